"""Other intrinsic rewards, to compare with: `--method experiments.rewards:NAME`.

A reward is a function (signals, config) -> r_int (B, G), or a class for one that has to remember
something: a module that is made with (size of the features, config), called like such a function,
and whose state_dict goes into the checkpoint. The gate, alpha and the logging are train.py's work.

    novelty      distance to the group's other correct responses
    icm          Pathak et al. 2017: error of the forward model M; needs --reading equations
    rnd          Burda et al. 2018: error of distilling a random network
    count        Bellemare et al. 2016: 1 / sqrt(running share) of the embedding's cluster
    uniqueness   Hu et al. 2026: 1 / correct responses of the group in the same cluster
    oracle       minus log of the *true* strategy's running share: only to compare with
"""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from reward import Signals
from strategy import DIMENSION, LEARNING_RATE, Standardise, mlp
from support import parallel
from support.checkpoint import Learner
from support.clustering import CLUSTERS, k_means, nearest, spread_centres
from support.config import Config

DECAY = 0.9  # each batch weighs this much of what the next one weighs


def novelty(signals: Signals, config: Config) -> Tensor:
    """Mean distance 1 - cos of a response's embedding to the group's other correct responses."""
    z = F.normalize(signals.z_post, dim=-1)
    distance = 1 - z @ z.transpose(1, 2)  # (B, G, G)
    itself = torch.eye(distance.shape[1], device=distance.device)
    others = signals.correct[:, None, :] * (1 - itself)
    return (distance * others).sum(-1) / others.sum(-1).clamp(min=1)


def icm(signals: Signals, config: Config) -> Tensor:
    """|M(s, a) - s'|: how far the forward model misses the next state's features."""
    if signals.predicted is None:
        raise ValueError("--method experiments.rewards:icm needs --reading equations, which has M")
    return (signals.predicted - signals.state).norm(dim=-1)


class rnd(Learner):
    """|f(response) - g(response)|^2 for a frozen random f and a g that learns from every batch."""

    def __init__(self, size: int, config: Config):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.random = mlp(size, DIMENSION).requires_grad_(False)
            self.distilled = mlp(size, DIMENSION)
        self.norm = Standardise(size)
        self.updates = config.strategy_updates
        self.make_optimizer(LEARNING_RATE)

    def error(self, response: Tensor) -> Tensor:
        x = self.norm(response)
        return (self.distilled(x) - self.random(x)).square().mean(-1)

    def forward(self, signals: Signals, config: Config) -> Tensor:
        batch = parallel.gather(signals.features.response)
        self.norm.update(batch)
        with torch.no_grad():
            bonus = self.error(signals.features.response)
        for _ in range(self.updates):
            self.optimizer.zero_grad()
            self.error(batch).mean().backward()
            self.optimizer.step()
        return bonus


class Clusters(nn.Module):
    """Cluster centres that follow the policy's embeddings, one round of k-means per batch."""

    def __init__(self, size: int, config: Config):
        super().__init__()
        self.register_buffer("centres", torch.zeros(CLUSTERS, DIMENSION))
        self.register_buffer("shares", torch.zeros(CLUSTERS))  # decaying counts

    def assign(self, signals: Signals) -> Tensor:
        """Move the centres, count -> the cluster of each response (B, G)."""
        points = parallel.gather(signals.z_post).flatten(0, 1)
        if not self.centres.any():
            self.centres.copy_(spread_centres(points, CLUSTERS))
        self.centres.copy_(k_means(points, self.centres, 1))
        counts = nearest(points, self.centres).bincount(minlength=CLUSTERS)
        self.shares.mul_(DECAY).add_(counts)
        return nearest(signals.z_post, self.centres)


class count(Clusters):
    def forward(self, signals: Signals, config: Config) -> Tensor:
        cluster = self.assign(signals)
        share = self.shares / self.shares.sum().clamp(min=1)
        return share[cluster].clamp(min=1e-6).rsqrt()


class uniqueness(Clusters):
    def forward(self, signals: Signals, config: Config) -> Tensor:
        cluster = self.assign(signals)
        same = cluster[:, :, None] == cluster[:, None, :]  # (B, G, G)
        return 1 / (same * signals.correct[:, None, :]).sum(-1).clamp(min=1)


class oracle(nn.Module):
    """- log of the running share of the response's true strategy, 0 where it has none."""

    def __init__(self, size: int, config: Config):
        super().__init__()
        self.counts: dict[str, float] = {}

    def get_extra_state(self) -> Tensor:
        return torch.tensor(list(json.dumps(self.counts).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        self.counts = json.loads(bytes(state.tolist()))

    def forward(self, signals: Signals, config: Config) -> Tensor:
        if not hasattr(signals.problems[0], "strategy_of"):
            raise ValueError("--method experiments.rewards:oracle reads true strategies, which "
                             f"{config.data} does not have: choose another method")
        G = signals.correct.shape[1]
        labels = [signals.problems[n // G].strategy_of(text)
                  for n, text in enumerate(signals.responses)]
        self.counts = {label: DECAY * count for label, count in self.counts.items()}
        for label in parallel.gather_lists(labels):
            if label is not None:
                self.counts[label] = self.counts.get(label, 0.0) + 1.0
        total = max(1.0, sum(self.counts.values()))
        shares = [1.0 if label is None else self.counts[label] / total for label in labels]
        return -torch.tensor(shares).log().view_as(signals.correct).to(signals.correct)
