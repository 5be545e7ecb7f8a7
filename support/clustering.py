"""One clustering of strategy embeddings for all policies that are compared.

Entropies of clusters can only be compared when the clusters are the same. So a strategy head and a
k-means clustering are fitted once, to the base policy's responses, and kept for all evaluations of
a run. The evaluation before the first step draws the same responses whatever the method and the
seed, so all runs on one base model have the same clustering. No true strategy is used.
"""
import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from strategy import BATCH, DIMENSION, Features, Standardise, Strategist, mlp
from support import files
from support.config import Config

CLUSTERS = 12
EPOCHS = 96  # in which the strategy head sees all groups


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """points (..., d), centres (K, d) -> the index of each point's nearest centre (...)."""
    return torch.cdist(points, centres).argmin(-1)


def spread_centres(points: Tensor, count: int) -> Tensor:
    """Starting centres (count, d): each next one is the point farthest from those chosen so far."""
    centres = points[:1]
    while len(centres) < count:
        distance = torch.cdist(points, centres).amin(1)
        centres = torch.cat((centres, points[distance.argmax()][None]))
    return centres


def k_means(points: Tensor, centres: Tensor, rounds: int) -> Tensor:
    """Lloyd's algorithm from the given centres (K, d); an empty cluster keeps its centre."""
    for _ in range(rounds):
        member = nearest(points, centres)
        sums = torch.zeros_like(centres).index_add_(0, member, points)
        counts = member.bincount(minlength=len(centres))[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres


class Clustering(nn.Module):
    """A frozen strategy head, cluster centres, and a plane that shows embeddings as a map."""

    def __init__(self, size: int):
        super().__init__()
        self.head = mlp(size, DIMENSION)
        self.norm = Standardise(size)
        shapes = {"centres": (CLUSTERS, DIMENSION), "middle": (DIMENSION,), "plane": (DIMENSION, 2)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))

    @classmethod
    def fit(cls, features: Features, epochs: int | None = None) -> "Clustering":
        """Learn to tell the responses of B problems apart, then cluster them. No label is used."""
        B, G, size = features.response.shape
        device = features.response.device
        strategist = Strategist(size, Config(samples=G), recent=B).to(device)
        strategist.remember(features, torch.zeros(B, G, device=device))
        epochs = EPOCHS if epochs is None else epochs
        strategist.learn(epochs * math.ceil(B / BATCH), torch.Generator().manual_seed(0))
        clustering = cls(size).to(device)
        clustering.head.load_state_dict(strategist.PSE.state_dict())
        clustering.norm.load_state_dict(strategist.response_norm.state_dict())
        points = clustering.embed(features)
        clustering.centres = k_means(points, spread_centres(points, CLUSTERS), 20)
        clustering.middle = points.mean(0)
        # Principal directions, in fp64 on the CPU; the diagonal helps when all points are equal.
        centred = (points - clustering.middle).double().cpu()
        noise = 1e-9 * torch.eye(DIMENSION, dtype=torch.float64)
        _, vectors = torch.linalg.eigh(centred.T @ centred + noise)  # rising eigenvalues
        plane = vectors.to(points)[:, [-1, -2]]
        signs = plane.gather(0, plane.abs().argmax(0, keepdim=True)).sign()  # otherwise arbitrary
        clustering.plane = plane * signs
        return clustering

    @torch.no_grad()
    def embed(self, features: Features) -> Tensor:
        """Strategy embeddings of the responses, (B * G, d)."""
        return F.normalize(self.head(self.norm(features.response)), dim=-1).flatten(0, 1)

    def read(self, features: Features) -> tuple[Tensor, Tensor]:
        """-> the cluster (B, G) of each response and its place (B, G, 2) on the map."""
        points, shape = self.embed(features), features.response.shape[:2]
        places = (points - self.middle) @ self.plane
        return nearest(points, self.centres).view(shape), places.view(*shape, 2)

    @classmethod
    def load_if_there(cls, run: Path, model) -> "Clustering | None":
        """The clustering of a run folder, which its first evaluation has fitted."""
        file = run / "clustering.safetensors"
        if not file.exists():
            return None
        clustering = cls(model.config.hidden_size)
        tensors = files.read_tensors(file)
        files.check_tensors(tensors, clustering.state_dict(), str(file))
        clustering.load_state_dict(tensors)
        return clustering.to(model.device)
