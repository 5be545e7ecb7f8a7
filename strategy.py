"""Strategy networks (paper, Sections 3.2 and 3.6): what kind of response is this, and was it to be expected?

    z = E(x)      the strategy head: three linear layers, LayerNorm and ReLU between, to d = 128, unit length
    PSE           the momentum head, an exponential average of E: the stable target
    P(query)      the probability of success                                      binary cross-entropy
    M(s, a)       the next state's features from the state's and an action embedding       mean squared error

x are the mean-pooled features of encoder.py, standardised by their running statistics.

What E learns. The numbers of a problem dominate raw features, so E is trained with InfoNCE on two views of one
response, each the mean of a random half of its tokens, against the *other responses to the same query*: they share
the numbers, so only the way of solving tells them apart (`--negatives batch` is the paper's in-batch choice). And
E(query) is drawn towards PSE of the responses to that query: it becomes the expected strategy, and SS the distance
of a response from it.

Two memories. What a policy does changes within steps, so E and M learn from the newest groups only; what it can do
changes slowly and must be learned across many problems, so P learns from a long record of queries and outcomes. P on the
newest groups alone hardly generalises to new problems, E on old ones chases strategies that are gone.

These networks have their own optimizer and see detached features only: the policy's loss sends nothing here, and
theirs nothing back. All of their state, both memories included, is `state()` and goes into the checkpoint.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import encoder
import grpo
import parallel
import reward
from encoder import Features
from files import pack_optimizer, unpack_optimizer
from model import Transformer
from sample import Rollout


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Three linear layers, LayerNorm and ReLU between."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.ReLU(),
                         nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Standardise(nn.Module):
    """(x - mean) / deviation with running statistics of the last `memory` rows or so; no gradient."""
    def __init__(self, size: int, memory: float = 20_000):
        super().__init__()
        self.memory = memory
        for name in ("count", "mean", "variance"):
            self.register_buffer(name, torch.zeros(size if name != "count" else 1))

    def update(self, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        total = self.count + len(x)
        shift = x.mean(0) - self.mean
        self.variance += (x.var(0, unbiased=False) - self.variance + shift.square() * self.count / total) * len(x) / total
        self.mean += shift * len(x) / total
        self.count.copy_(total.clamp(max=self.memory))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / (self.variance.sqrt() + 1e-5)


class Networks(nn.Module):
    """E and its momentum twin, P, M, and the distillation pair of RND, on standardised features of size D."""
    def __init__(self, size: int, dimension: int, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):             # leave the caller's random numbers alone
            torch.manual_seed(seed)
            self.head, self.target = mlp(size, dimension, dimension), mlp(size, dimension, dimension)
            self.predictor = mlp(size, dimension, 1)
            self.action, self.world = nn.Linear(size, dimension), mlp(size + dimension, dimension, size)
            self.random, self.distilled = mlp(size, dimension, dimension), mlp(size, dimension, dimension)
        self.target.load_state_dict(self.head.state_dict())
        self.target.requires_grad_(False), self.random.requires_grad_(False)
        self.norms = nn.ModuleDict({name: Standardise(size) for name in ("query", "response", "both")})

    def observe(self, batch: Features) -> None:
        for name, norm in self.norms.items():
            norm.update(getattr(batch, name))

    def embed(self, x: Tensor, kind: str, momentum: bool = False) -> Tensor:
        """Features of one kind -> strategy embeddings of unit length (..., d)."""
        return F.normalize((self.target if momentum else self.head)(self.norms[kind](x)), dim=-1)

    def success_logit(self, query: Tensor) -> Tensor:
        return self.predictor(self.norms["query"](query)).squeeze(-1)

    def next_state(self, query: Tensor, response: Tensor) -> Tensor:
        """M(s, a): standardised features of query and response together, from the query's and the response's."""
        state = self.norms["query"](query)[:, None].expand_as(response)
        return self.world(torch.cat((state, self.action(self.norms["response"](response))), dim=-1))

    def distillation_error(self, response: Tensor) -> Tensor:
        x = self.norms["response"](response)
        return (self.distilled(x) - self.random(x)).square().mean(-1)

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """target <- momentum * target + (1 - momentum) * head"""
        for slow, fast in zip(self.target.parameters(), self.head.parameters()):
            slow.lerp_(fast, 1 - momentum)


def contrast(anchors: Tensor, targets: Tensor, temperature: float, negatives: str,
             same: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """InfoNCE: anchors, targets (B, G, d) -> (loss, share of anchors nearest to their own target).

    A row's positive is its own other view; its negatives are the group's other rows, or all other rows. same (B, G, G):
    pairs of a group that say the same, which a policy with few strategies has many of; they are no negatives.
    """
    if same is not None:
        same = same & ~torch.eye(same.shape[1], dtype=torch.bool, device=same.device)
    if negatives == "batch":
        anchors, targets = anchors.flatten(0, 1)[None], targets.flatten(0, 1)[None]
        same = None if same is None else torch.block_diag(*same)[None]
    logits = anchors @ targets.transpose(1, 2) / temperature                                     # (B, G, G)
    if same is not None:
        logits = logits.masked_fill(same, -torch.inf)
    labels = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape[:2])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), (logits.argmax(-1) == labels).float().mean()


class Replay:
    """The last `capacity` rows of whatever is put in, sampled uniformly and without repeats."""
    def __init__(self, capacity: int):
        self.capacity, self.store, self.added = capacity, {}, 0

    def add(self, **rows: Tensor) -> None:
        for name, value in rows.items():
            if name not in self.store:
                self.store[name] = value.new_zeros(self.capacity, *value.shape[1:])
            slots = (self.added + torch.arange(len(value), device=value.device)) % self.capacity
            self.store[name][slots[-self.capacity:]] = value[-self.capacity:]
        self.added += len(value)

    def sample(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        rows = torch.randperm(min(self.added, self.capacity), generator=generator)[:count]
        return {name: value[rows.to(value.device)] for name, value in self.store.items()}


def loss(networks: Networks, batch: Features, queries: Tensor, correct: Tensor, temperature: float, negatives: str,
         together: bool = False) -> tuple[Tensor, dict]:
    """The strategy prediction loss: contrast + expectation + success + world + distillation, and its parts.

    P learns from queries (N, D) and what came of them, correct (N, G); everything else from the batch.
    together: the equations' reading embeds query and response as one, so E must tell those apart as well.
    """
    same = (batch.response[:, :, None] - batch.response[:, None]).abs().amax(-1) < 1e-4          # (B, G, G)
    first, second = networks.embed(batch.views, "response").unbind(2)                            # (B, G, d) each
    with torch.no_grad():
        states = torch.cat((batch.views, batch.response[:, :, None]), dim=2)                     # (B, G, 3, D)
        slow_first, slow_second, achieved = networks.embed(states, "response", momentum=True).unbind(2)
    contrastive, accuracy = contrast(first, slow_second, temperature, negatives, same)
    mirrored, _ = contrast(second, slow_first, temperature, negatives, same)
    expected = networks.embed(batch.query, "query")[:, None]                                     # (B, 1, d)
    expectation = (1 - (expected * achieved).sum(-1)).mean()
    logits = networks.success_logit(queries)[:, None].expand_as(correct)
    success = F.binary_cross_entropy_with_logits(logits, correct)
    world = F.mse_loss(networks.next_state(batch.query, batch.response), networks.norms["both"](batch.both))
    distillation = networks.distillation_error(batch.response).mean()
    total = (contrastive + mirrored) / 2 + expectation + success + world + distillation
    if together:
        total = total + contrast(networks.embed(batch.both, "both"), achieved, temperature, negatives, same)[0]
    return total, {"contrastive_loss": contrastive.item(), "contrastive_accuracy": accuracy.item(),
                   "expectation_loss": expectation.item(), "success_loss": success.item(), "world_loss": world.item()}


class Frequencies:
    """How often each label was seen lately: every batch weighs `decay` times what the next one weighs."""
    def __init__(self, decay: float = 0.9):
        self.decay, self.counts = decay, {}

    def update(self, labels: list[str | None]) -> None:
        self.counts = {label: self.decay * count for label, count in self.counts.items()}
        for label in labels:
            if label is not None:
                self.counts[label] = self.counts.get(label, 0.0) + 1.0

    def of(self, labels: list[str | None]) -> Tensor:
        """The running share of each label, 1 where there is none: nothing to be surprised about. A label never seen
        counts as seen once."""
        total = max(1.0, sum(self.counts.values()))
        return torch.tensor([1.0 if label is None else self.counts.get(label, 1.0) / total for label in labels])


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(points, centres).argmin(-1)


def spread(points: Tensor, count: int) -> Tensor:
    """Starting centres (count, d): each next one is the point farthest from those chosen so far."""
    centres = points[:1]
    while len(centres) < count:
        centres = torch.cat((centres, points[torch.cdist(points, centres).amin(1).argmax()][None]))
    return centres


def k_means(points: Tensor, centres: Tensor, rounds: int) -> Tensor:
    """Lloyd's algorithm from the given centres (K, d); an empty cluster keeps its centre."""
    for _ in range(rounds):
        sums = torch.zeros_like(centres).index_add_(0, member := nearest(points, centres), points)
        counts = member.bincount(minlength=len(centres))[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres)
    return centres


@dataclass(frozen=True)
class Settings:
    """The knobs of the strategy networks, as train.py's flags explain them."""
    reading: str = "algorithm"
    layer: int = 1
    encoder: str = ""
    dimension: int = 128
    negatives: str = "group"
    contrast_temperature: float = 0.5
    momentum: float = 0.99
    learning_rate: float = 3e-3
    batch: int = 32
    recent: int = 64
    buffer: int = 1024
    clusters: int = 12
    seed: int = 0


class Strategist:
    """The networks, their optimizer, the replay buffer and the running counts, as train.py uses them."""
    def __init__(self, model: Transformer, settings: Settings):
        if settings.layer > len(model.layers):
            raise ValueError(f"--layer {settings.layer}: the model has {len(model.layers)} layers")
        self.model, self.settings = model, settings
        self.sentences = encoder.SentenceEncoder(settings.encoder, model.device) if settings.encoder else None
        size = self.sentences.model.config.hidden_size if self.sentences else model.config.hidden_size
        self.networks = Networks(size, settings.dimension, settings.seed).to(model.device)
        self.learning = {name: p for name, p in self.networks.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.learning.values(), lr=settings.learning_rate, fused=True)
        self.recent, self.outcomes, self.centres = Replay(settings.recent), Replay(settings.buffer), None
        self.strategies, self.clusters = Frequencies(), Frequencies()
        self.scale = Standardise(1).to(model.device)        # running statistics of the intrinsic reward

    def scaled(self, intrinsic: Tensor) -> Tensor:
        """Divided by its running deviation, as RND does; a reward that hardly varies stays as it is."""
        self.scale.update(parallel.gather(intrinsic)[..., None])
        deviation = self.scale.variance.sqrt()
        return intrinsic / torch.where(deviation > 1e-3, deviation, 1.0)

    def encode(self, prompts: list[list[int]], rollout: Rollout, queries: list[str], responses: list[str],
               settings: grpo.LossSettings, generator: torch.Generator) -> tuple[Features, Tensor | None]:
        """-> features, and the reference log-probabilities if the KL penalty needs them: one pass serves both."""
        def refer() -> Tensor | None:
            return grpo.reference_logprobs(self.model, prompts, rollout, settings) if settings.kl else None
        if self.sentences:
            return self.sentences.features(queries, responses, generator), refer()
        with encoder.Tap(self.model, self.settings.layer) as tap:
            reference = refer()
        return encoder.base_features(self.model, prompts, rollout, self.settings.layer, settings.micro_batch, generator,
                                     tap.states or None), reference

    def observe(self, batch: Features, correct: Tensor) -> tuple[Features, Tensor]:
        """Take in a batch and what came of it, every rank's share -> the whole batch."""
        batch, correct = encoder.gather(batch), parallel.gather(correct)
        self.take_in(batch, correct)
        return batch, correct

    def take_in(self, batch: Features, correct: Tensor) -> None:
        self.networks.observe(batch)
        self.recent.add(**vars(batch))
        self.outcomes.add(query=batch.query, correct=correct)

    @torch.no_grad()
    def tally(self, batch: Features, labels: list[str | None]) -> None:
        """Move the cluster centres along and count what this batch shows. labels: true strategies, for the oracle only."""
        achieved = self.networks.embed(batch.response, "response", momentum=True).flatten(0, 1)
        if self.centres is None:
            seen = self.recent.store["response"][:min(self.recent.added, self.recent.capacity)].flatten(0, 1)
            self.centres = spread(self.networks.embed(seen, "response", momentum=True), self.settings.clusters)
        self.centres = k_means(achieved, self.centres, 1)
        self.clusters.update([str(c) for c in nearest(achieved, self.centres).tolist()]), self.strategies.update(labels)

    @torch.no_grad()
    def signals(self, batch: Features, correct: Tensor, rollout: Rollout, labels: list[str | None]) -> reward.Signals:
        """What the rewards of this batch may look at. correct (B, G)."""
        networks, algorithm = self.networks, self.settings.reading == "algorithm"
        expected = networks.embed(batch.query, "query")[:, None]                                 # (B, 1, d)
        achieved = networks.embed(batch.response, "response", momentum=True)                     # (B, G, d)
        z_post = achieved if algorithm else networks.embed(batch.both, "both")
        scale = batch.query.shape[-1] ** -0.5               # so that the norm of Eq. 3 does not grow with D
        cluster = nearest(achieved, self.centres)                                                # (B, G)
        names = [str(c) for c in cluster.flatten().tolist()]
        return reward.Signals(
            correct=correct, logprobs=rollout.logprobs.view(*correct.shape, -1), lengths=rollout.lengths.view_as(correct),
            z_pre=expected.expand_as(achieved), z_post=z_post, success=self.success(batch),
            predicted=networks.next_state(batch.query, batch.response) * scale, state=networks.norms["both"](batch.both) * scale,
            distillation=networks.distillation_error(batch.response), cluster=cluster,
            cluster_share=self.clusters.of(names).view_as(correct).to(correct),
            strategy_share=self.strategies.of(labels).view_as(correct).to(correct), reading=self.settings.reading)

    @torch.no_grad()
    def success(self, batch: Features) -> Tensor:
        """P(query), (B, 1)."""
        return self.networks.success_logit(batch.query).sigmoid()[:, None]

    def update(self, count: int, generator: torch.Generator) -> dict[str, float]:
        """`count` minibatches -> the last one's losses. P sees as many queries as E sees responses."""
        settings, metrics = self.settings, {}
        for _ in range(count):
            batch = Features(**self.recent.sample(settings.batch, generator))
            outcomes = self.outcomes.sample(batch.response[:, :, 0].numel(), generator)
            total, metrics = loss(self.networks, batch, outcomes["query"], outcomes["correct"], settings.contrast_temperature,
                                  settings.negatives, together=settings.reading == "equations")
            total.backward()
            norm = torch.nn.utils.get_total_norm([weight.grad for weight in self.learning.values() if weight.grad is not None])
            if total.isfinite() and norm.isfinite():
                self.optimizer.step()
                self.networks.follow(settings.momentum)
            self.optimizer.zero_grad()                      # gradients that lie about would add to the policy's peak
        return metrics

    def state(self) -> tuple[dict[str, Tensor], dict]:
        """-> tensors and plain values that a checkpoint must hold."""
        tensors = {f"networks.{name}": value for name, value in self.networks.state_dict().items()}
        tensors |= pack_optimizer("optimizer", self.learning, self.optimizer)
        tensors |= {f"recent.{name}": value for name, value in self.recent.store.items()}
        tensors |= {f"outcomes.{name}": value for name, value in self.outcomes.store.items()}
        tensors |= {f"scale.{name}": value for name, value in self.scale.state_dict().items()}
        if self.centres is not None:
            tensors["centres"] = self.centres
        return tensors, {"added": self.recent.added, "strategies": self.strategies.counts, "clusters": self.clusters.counts}

    def load_state(self, tensors: dict[str, Tensor], values: dict) -> None:
        def part(prefix):
            return {name.removeprefix(prefix): value.to(self.model.device) for name, value in tensors.items()
                    if name.startswith(prefix)}
        self.networks.load_state_dict(part("networks.")), self.scale.load_state_dict(part("scale."))
        unpack_optimizer("optimizer", self.learning, self.optimizer, tensors)
        for memory, name, ranks in ((self.recent, "recent", {"query": 2, "response": 3, "views": 4, "both": 3}),
                                    (self.outcomes, "outcomes", {"query": 2, "correct": 2})):
            memory.store, memory.added = part(f"{name}."), values["added"]
            if {key: value.ndim for key, value in memory.store.items()} != ranks or type(memory.added) is not int or \
                    memory.added < 1 or any(len(value) != memory.capacity for value in memory.store.values()):
                raise ValueError(f"its memory {name} has other tensors than this run's")
        self.centres = part("centres").get("")
        if self.centres is not None and self.centres.shape != (self.settings.clusters, self.settings.dimension):
            raise ValueError(f"its centres have shape {tuple(self.centres.shape)}")
        for frequencies, name in ((self.strategies, "strategies"), (self.clusters, "clusters")):
            if not isinstance(values[name], dict) or not all(type(count) is float for count in values[name].values()):
                raise ValueError(f"its counts of {name} are not numbers")
            frequencies.counts = values[name]
