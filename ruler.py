"""One ruler for the strategies of all policies compared: an embedding, a clustering and a map, learned once.

The paper measures diversity as the entropy of clusters of strategy embeddings. Entropies can only be compared when the
clusters are the same, so they are fitted once, on the base policy's responses to the evaluation's problems: the strategy
head learns to tell those responses apart (strategy.py), k-means cuts its embeddings into clusters, and their two
principal directions make a map to look at. The evaluation before the first step draws the same responses whatever the
method and seed of the run, so all runs on one base model hold the same ruler; it lies in the run's folder.

No true strategy enters. evaluate.py calls it, plot.py draws the map.
"""
from pathlib import Path

import torch
from torch import Tensor

import strategy
from encoder import Features
from files import read_tensors, write_tensors
from model import Transformer

CLUSTERS, PASSES = 12, 32


class Ruler:
    def __init__(self, networks: strategy.Networks, centres: Tensor, middle: Tensor, plane: Tensor):
        self.networks, self.centres, self.middle, self.plane = networks, centres, middle, plane

    @classmethod
    def fit(cls, model: Transformer, features: Features) -> "Ruler":
        """From features of B problems with G responses each, as encoder.base_features gives them."""
        B, G = features.response.shape[:2]
        strategist = strategy.Strategist(model, strategy.Settings(recent=B, buffer=B))
        strategist.take_in(features, torch.zeros(B, G, device=model.device))
        strategist.update(PASSES * -(-B // strategist.settings.batch), torch.Generator().manual_seed(0))
        points = embed(strategist.networks, features)
        centres = strategy.k_means(points, strategy.spread(points, CLUSTERS), 20)
        middle = points.mean(0)
        # In fp64 on the CPU, and not exactly singular: responses that are all alike must not keep it from converging.
        spread = (points - middle).double().cpu()
        _, vectors = torch.linalg.eigh(spread.T @ spread + 1e-9 * torch.eye(points.shape[1], dtype=torch.float64))
        vectors = vectors.to(points)                        # rising eigenvalues
        plane = vectors[:, [-1, -2]] if points.shape[1] > 1 else vectors[:, [-1, -1]]            # (d, 2)
        plane = plane * plane.gather(0, plane.abs().argmax(0, keepdim=True)).sign()               # their sign is arbitrary
        return cls(strategist.networks, centres, middle, plane)

    def read(self, features: Features) -> tuple[Tensor, Tensor]:
        """-> the cluster (B, G) of each response and its place (B, G, 2) on the map."""
        points, shape = embed(self.networks, features), features.response.shape[:2]
        return strategy.nearest(points, self.centres).view(shape), ((points - self.middle) @ self.plane).view(*shape, 2)

    def save(self, file: Path) -> None:
        write_tensors(file, {**{f"networks.{name}": value for name, value in self.networks.state_dict().items()},
                             "centres": self.centres, "middle": self.middle, "plane": self.plane})

    @classmethod
    def load(cls, file: Path, model: Transformer) -> "Ruler":
        settings = strategy.Settings()
        networks = strategy.Networks(model.config.hidden_size, settings.dimension, settings.seed)
        try:
            tensors = read_tensors(file)
            networks.load_state_dict({name.removeprefix("networks."): value for name, value in tensors.items()
                                      if name.startswith("networks.")})
            placed = [tensors[name].to(model.device) for name in ("centres", "middle", "plane")]
            d = settings.dimension
            if [tuple(part.shape) for part in placed] != [(CLUSTERS, d), (d,), (d, 2)]:
                raise KeyError("shape")
        except (KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"{file} is damaged or does not fit this model ({type(error).__name__}): remove it to go on without "
                             "cluster entropies") from None
        return cls(networks.to(model.device), *placed)


@torch.no_grad()
def embed(networks: strategy.Networks, features: Features) -> Tensor:
    """PSE(response), (B * G, d)."""
    return networks.embed(features.response, "response", momentum=True).flatten(0, 1)
