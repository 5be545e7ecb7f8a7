"""Other intrinsic rewards, to compare with: `--method experiments.rewards:NAME`.

A reward is a function (signals, config) -> r_int (B, G), or a class for one that has to remember
something: a module that is made with (size of the features, config), called like such a function,
and whose state_dict goes into the checkpoint. The gate, alpha and the logging are train.py's work.

Rivals and controls of SuS's second part, which look at correctness alone:
    passk        Chen et al. 2025, arXiv 2508.10751: Pass@k training, k = 4
                 (--bonus added --gate none --alpha 1 --alpha-decay 0)
    focal        1 - the group's accuracy: the success surprise without a network (--bonus scaled)
of its first part, which tell the correct responses of a group apart:
    novelty      distance to the group's other correct responses
    repository   Kashirskiy and Makarov, March 2026: novelty times difficulty, nothing learned
    elliptical   2510.11686: leverage of the frozen features in their group
    unlikeliness He et al. 2025, 2506.02355: rank of a response's probability
                 (--bonus added --alpha 0.25 --alpha-decay 0)
    smoothing    Gai et al. 2025, 2511.19942: improbable if right, probable if wrong
                 (--bonus added --gate group --alpha 0.02 --alpha-decay 0)
of both:
    shuffled     SuS's bonuses, dealt out at random among the responses that earn
    flat         their mean for each
    random_embeddings    SuS with random unit vectors in place of z_post
and others:
    icm          Pathak et al. 2017: error of the forward model M; needs --reading equations
    rnd          Burda et al. 2018: mean squared error of distilling a random network
    count        Bellemare et al. 2016: 1 / sqrt(running share) of the embedding's cluster
    uniqueness   Hu et al. 2026: 1 / correct responses of the group in the same cluster
    oracle       minus log of the *true* strategy's running share: only to compare with
    group_oracle 1 / correct responses of the group with the same true strategy: the same
"""
import json
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from reward import Signals, gate, other_successes, sus
from sample import seeded
from strategy import DIMENSION, LEARNING_RATE, Standardise, mlp
from support import parallel
from support.checkpoint import Learner
from support.clustering import CLUSTERS, k_means, nearest, spread_centres
from support.config import Config

DECAY = 0.9  # each batch weighs this much of what the next one weighs
PASS_K = 4


class Table(nn.Module):
    """A reward that remembers a number per text; its state_dict holds them as JSON."""

    def __init__(self, size: int, config: Config):
        super().__init__()
        self.table: dict[str, float] = {}

    def get_extra_state(self) -> Tensor:
        return torch.tensor(list(json.dumps(self.table).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        self.table = json.loads(bytes(state.tolist()))


def require_gate(config: Config, wanted: str) -> None:
    """For rewards that pay wrong responses too."""
    if config.gate != wanted or config.bonus != "added":
        raise ValueError(f"--method {config.method} needs --gate {wanted} --bonus added")


def passk(signals: Signals, config: Config) -> Tensor:
    """A wrong response is paid the chance that k - 1 others of its group hold a right one.

    Centred in its group, c plus this is the paper's advantage before its division.
    """
    G = signals.correct.shape[1]
    require_gate(config, "none")
    if G < PASS_K:
        raise ValueError(f"--method {config.method} needs --samples {PASS_K} or more")
    wrong = (1 - signals.correct).sum(1, keepdim=True)
    all_wrong = torch.ones_like(wrong)  # the chance that k - 1 others are all wrong
    for j in range(PASS_K - 1):
        all_wrong = all_wrong * ((wrong - 1 - j) / (G - 1 - j)).clamp(min=0)
    return (1 - signals.correct) * (1 - all_wrong)


def focal(signals: Signals, config: Config) -> Tensor:
    """1 - the group's accuracy."""
    return (1 - signals.correct.mean(1, keepdim=True)).expand_as(signals.correct)


def unlikeliness(signals: Signals, config: Config) -> Tensor:
    """- rank / G of a response's probability in its group; rank 0 is the least likely.

    Of equally likely responses the first has the lower rank.
    """
    rank = signals.logprobs.sum(-1).argsort(dim=1, stable=True).argsort(1)
    return -rank.float() / signals.correct.shape[1]


def smoothing(signals: Signals, config: Config) -> Tensor:
    """- log pi of a correct response, + log pi of a wrong one."""
    require_gate(config, "group")
    total = signals.logprobs.sum(-1)
    return torch.where(signals.correct > 0, -total, total)


def elliptical(signals: Signals, config: Config) -> Tensor:
    """h^T (I + H^T H)^-1 h of the centred, normalised frozen features of a group, (B, G)."""
    response = signals.features.response
    h = F.normalize(response - response.mean(1, keepdim=True), dim=-1)
    identity = torch.eye(h.shape[1], device=h.device)
    # H (I + H^T H)^-1 H^T = I - (I + H H^T)^-1: a G x G inverse instead of D x D.
    inverse = torch.linalg.inv(h @ h.transpose(1, 2) + identity)
    return 1 - inverse.diagonal(dim1=1, dim2=2)


def random_of(signals: Signals, config: Config) -> torch.Generator:
    """Random numbers that a resumed run draws again."""
    return seeded(config.seed, *signals.responses)


def shuffled(signals: Signals, config: Config) -> Tensor:
    """Each of SuS's bonuses goes to a random one of the responses that earn (of the same rank)."""
    bonus = sus(signals, config)
    earns = gate(signals.correct, config.gate) > 0
    paid = bonus[earns]
    order = torch.randperm(len(paid), generator=random_of(signals, config))
    return bonus.masked_scatter(earns, paid[order.to(paid.device)])


def flat(signals: Signals, config: Config) -> Tensor:
    """Every response that earns gets their mean."""
    bonus = sus(signals, config)
    paid = parallel.gather(bonus[gate(signals.correct, config.gate) > 0])
    return torch.full_like(bonus, paid.mean().item() if len(paid) else 0.0)


def random_embeddings(signals: Signals, config: Config) -> Tensor:
    """SuS of random strategies."""
    z = torch.randn(signals.z_post.shape, generator=random_of(signals, config))
    return sus(replace(signals, z_post=F.normalize(z, dim=-1).to(signals.z_post)), config)


def distances(z: Tensor, correct: Tensor, alone: float) -> Tensor:
    """Mean distance 1 - cos (B, G) of each response to the group's other correct ones."""
    z = F.normalize(z, dim=-1)
    distance = 1 - z @ z.transpose(1, 2)  # (B, G, G)
    others = other_successes(correct)
    count = others.sum(-1)
    return torch.where(count > 0, (distance * others).sum(-1) / count.clamp(min=1), alone)


def novelty(signals: Signals, config: Config) -> Tensor:
    """Mean distance of a response's embedding to the group's other correct responses."""
    return distances(signals.z_post, signals.correct, alone=0.0)


class repository(Table):
    """The authors' reward since March 2026: novelty * (1 - running accuracy of the problem).

    Their features are a frozen sentence encoder's (--encoder), here by default the base model's.
    The table has each problem's running accuracy.
    """

    def forward(self, signals: Signals, config: Config) -> Tensor:
        prompts = [problem.prompt for problem in signals.problems]
        old = [self.table.get(prompt, 0.5) for prompt in prompts]
        shares = parallel.gather_lists(signals.correct.mean(1).tolist())
        for prompt, share in zip(parallel.gather_lists(prompts), shares):
            running = self.table.get(prompt, 0.5)
            self.table[prompt] = running + 0.1 * (share - running)
        difficulty = 1 - signals.correct.new_tensor(old)[:, None]
        return difficulty * distances(signals.features.response, signals.correct, alone=1.0)


def icm(signals: Signals, config: Config) -> Tensor:
    """|M(s, a) - s'|: how far the forward model misses the next state's features."""
    if signals.predicted is None:
        raise ValueError("--method experiments.rewards:icm needs --reading equations, which has M")
    return (signals.predicted - signals.state).norm(dim=-1)


class rnd(Learner):
    """Mean of (f(response) - g(response))^2, f frozen and random, g learning from every batch."""
    rate = LEARNING_RATE

    def __init__(self, size: int, config: Config):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.random = mlp(size, DIMENSION).requires_grad_(False)
            self.distilled = mlp(size, DIMENSION)
        self.norm = Standardise(size)
        self.updates = config.strategy_updates

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


def one_over_count(labels: Tensor, correct: Tensor) -> Tensor:
    """labels (B, G) -> 1 / correct responses of the group with the same label."""
    same = labels[:, :, None] == labels[:, None, :]  # (B, G, G)
    return 1 / (same * correct[:, None, :]).sum(-1).clamp(min=1)


class uniqueness(Clusters):
    def forward(self, signals: Signals, config: Config) -> Tensor:
        return one_over_count(self.assign(signals), signals.correct)


def true_strategies(signals: Signals, config: Config) -> list[str | None]:
    """Only for the oracles."""
    if not hasattr(signals.problems[0], "strategy_of"):
        raise ValueError(f"--method {config.method} reads true strategies, which {config.data} "
                         "does not have: choose another method")
    G = signals.correct.shape[1]
    return [signals.problems[n // G].strategy_of(text) for n, text in enumerate(signals.responses)]


def group_oracle(signals: Signals, config: Config) -> Tensor:
    """1 / correct responses of the group with the same *true* strategy."""
    labels = true_strategies(signals, config)
    numbers = {label: number for number, label in enumerate(set(labels))}
    own = signals.correct.new_tensor([numbers[label] for label in labels])
    return one_over_count(own.view_as(signals.correct), signals.correct)


class oracle(Table):
    """- log of the running share of the response's true strategy, 0 where it has none."""

    def forward(self, signals: Signals, config: Config) -> Tensor:
        labels = true_strategies(signals, config)
        self.table = {label: DECAY * count for label, count in self.table.items()}
        for label in parallel.gather_lists(labels):
            if label is not None:
                self.table[label] = self.table.get(label, 0.0) + 1.0
        total = max(1.0, sum(self.table.values()))
        shares = [1.0 if label is None else self.table[label] / total for label in labels]
        return -torch.tensor(shares).log().view_as(signals.correct).to(signals.correct)
