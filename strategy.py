"""Strategy networks (paper, Sections 3.2 and 3.6): which strategy is this, was it expected?

    z = E(x)      the strategy head: three linear layers, LayerNorm and ReLU between, to unit length
    PSE           the momentum head, an exponential average of E: the stable target
    P(query)      the probability of success

x is a frozen encoder's mean state over tokens, standardised by running statistics: of the policy's
own base model after its first layer's attention (in higher layers the problem's numbers hide the
strategy), or of a sentence encoder (support/sentences.py). The world model M: support/equations.py.

What E learns. Two random halves of a response's tokens lie close, the halves of *other responses to
the same query* far (InfoNCE): those share its numbers, so only the way of solving differs. Whole
responses, which SS compares, are in no such pair and would become ever more alike, so each is drawn
to its halves. E(query) is drawn to PSE of its responses. How SS uses both is reward.py's business.

What a policy does changes within steps, so E learns from the newest groups. What it can do changes
slowly, so P learns from a long record. No gradient passes between the policy and these networks.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import lora
from model import SharedPrefix, Transformer
from reward import Signals
from sample import Rollout, pad_left
from support import parallel
from support.checkpoint import Learner
from support.config import Config

DIMENSION = 128  # size d of a strategy embedding
CONTRAST_TEMPERATURE = 0.5  # of InfoNCE
MOMENTUM = 0.99  # of PSE
LEARNING_RATE = 3e-3
BATCH = 32  # groups in a minibatch
RECENT = 64  # newest groups, from which E learns
OUTCOMES = 1024  # queries and outcomes, from which P learns
STANDARDISE_ROWS = 20_000  # how many rows the running statistics remember


@dataclass
class Features:
    """Mean-pooled states of B problems with G responses each; D is the encoder's hidden size."""
    query: Tensor  # (B, D)
    response: Tensor  # (B, G, D)
    views: Tensor  # (B, G, 2, D), means over two random halves of the response
    both: Tensor | None = None  # (B, G, D), query and response as one; for --reading equations

    @staticmethod
    def join(parts: list["Features"]) -> "Features":
        fields = zip(*(vars(part).values() for part in parts))
        return Features(*(None if each[0] is None else torch.cat(each) for each in fields))

    def gather(self) -> "Features":
        """Every rank's features, in the order of the whole batch."""
        return Features(*(None if field is None else parallel.gather(field)
                          for field in vars(self).values()))


def pool(states: Tensor, mask: Tensor) -> Tensor:
    """states (n, T, D), mask (n, T) -> mean over the mask (n, D); zero where it is empty."""
    weights = mask.float()
    total = torch.einsum("ntd,nt->nd", states.float(), weights)
    return total / weights.sum(1, keepdim=True).clamp(min=1)


def random_halves(ids: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    """ids, mask (n, T) -> (n, 2, T): a random half of each row's tokens, and the other half.

    All copies of a token fall into the same half, so what the halves share is no single number or
    word but the way in which a response goes. A half that would be empty is the whole row.
    """
    kinds, kind = ids.unique(return_inverse=True)
    coin = torch.rand(len(ids), len(kinds), generator=generator).to(ids.device)
    heads = coin.gather(1, kind) < 0.5  # (n, T)
    halves = torch.stack((mask & heads, mask & ~heads), dim=1)
    return torch.where(halves.any(2, keepdim=True), halves, mask[:, None])


def pool_features(query_states: Tensor, query_mask: Tensor, states: Tensor, mask: Tensor,
                  halves: Tensor) -> Features:
    """query_states (B, n, D), query_mask (B, n); states (N, T, D), mask (N, T) and halves (N, 2, T)
    of N = B * G responses -> their means."""
    groups = (len(query_states), -1)  # (B, G)
    views = torch.stack([pool(states, half) for half in halves.unbind(1)], dim=1)
    return Features(pool(query_states, query_mask), pool(states, mask).unflatten(0, groups),
                    views.unflatten(0, groups))


class BaseEncoder:
    """The policy's own base model, adapters off: states after its first layer's attention."""

    def __init__(self, model: Transformer, micro_batch: int):
        self.model = model
        self.micro_batch = micro_batch
        self.size = model.config.hidden_size

    def first_layer(self, ids: Tensor, start: Tensor | None, prefix: SharedPrefix) -> Tensor:
        x, context = self.model.embed(ids, start, prefix)
        layer = self.model.layers[0]
        return x + layer.self_attn(layer.input_layernorm(x), *context)  # (n, T, D)

    def read(self, forward, prompts: list[list[int]], ids: Tensor):
        """Per micro-batch: its prompts' states and mask, its responses' states, its rows of ids."""
        samples, size = len(ids) // len(prompts), self.micro_batch
        for b in range(0, len(prompts), size):
            rows = slice(b * samples, (b + size) * samples)
            prefix = SharedPrefix(samples)
            prompt_ids, start = pad_left(prompts[b:b + size], ids.device)
            first = torch.zeros_like(prompt_ids[:, 0]) if start is None else start
            prompt_mask = torch.arange(prompt_ids.shape[1], device=ids.device) >= first[:, None]
            with lora.disabled(self.model):
                query_states = forward(prompt_ids, start, prefix)
                response_states = forward(ids[rows], start, prefix)
            yield query_states, prompt_mask, response_states, rows

    @torch.no_grad()
    def encode(self, problems: list, prompts: list[list[int]], rollout: Rollout,
               responses: list[str], generator: torch.Generator) -> Features:
        """Reads the token ids; a response's last token, nearly always its end, is left out."""
        ids, mask = rollout.ids[:, :-1], rollout.mask()[:, 1:]  # (N, T - 1)
        halves = random_halves(ids, mask, generator)  # for all rows at once: no micro-batch matters
        parts = []
        for query_states, query_mask, states, rows in self.read(self.first_layer, prompts, ids):
            parts.append(pool_features(query_states, query_mask, states, mask[rows], halves[rows]))
        return Features.join(parts)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Three linear layers, LayerNorm and ReLU between."""
    return nn.Sequential(nn.Linear(inputs, DIMENSION), nn.LayerNorm(DIMENSION), nn.ReLU(),
                         nn.Linear(DIMENSION, DIMENSION), nn.LayerNorm(DIMENSION), nn.ReLU(),
                         nn.Linear(DIMENSION, outputs))


class Standardise(nn.Module):
    """(x - mean) / deviation with running statistics."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.zeros(size))

    def update(self, x: Tensor) -> None:
        """Merge the mean and the variance of the rows of x (..., size) into the running ones."""
        x = x.reshape(-1, x.shape[-1])
        total = self.count + len(x)
        shift = x.mean(0) - self.mean
        between = shift.square() * self.count / total
        self.variance += (x.var(0, unbiased=False) - self.variance + between) * len(x) / total
        self.mean += shift * len(x) / total
        self.count.copy_(total.clamp(max=STANDARDISE_ROWS))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / (self.variance.sqrt() + 1e-5)


class Replay(nn.Module):
    """The last `capacity` rows of each named tensor, sampled uniformly and without repeats."""

    def __init__(self, capacity: int, **shapes: tuple[int, ...]):
        super().__init__()
        self.capacity = capacity
        self.names = tuple(shapes)
        self.register_buffer("added", torch.zeros(1, dtype=torch.long))
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(capacity, *shape))

    def add(self, **rows: Tensor) -> None:
        count = len(rows[self.names[0]])
        slots = (self.added + torch.arange(count, device=self.added.device)) % self.capacity
        for name in self.names:
            getattr(self, name)[slots[-self.capacity:]] = rows[name][-self.capacity:]
        self.added += count

    def sample(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        filled = min(int(self.added), self.capacity)
        rows = torch.randperm(filled, generator=generator)[:count].to(self.added.device)
        return {name: getattr(self, name)[rows] for name in self.names}


def same_responses(response: Tensor) -> Tensor:
    """(B, G, G): which responses of a group are alike; they are no negatives of each other."""
    return (response[:, :, None] - response[:, None]).abs().amax(-1) < 1e-4


def info_nce(anchors: Tensor, targets: Tensor, same: Tensor,
             negatives: str) -> tuple[Tensor, Tensor]:
    """anchors, targets (B, G, d) -> the loss, and the share of anchors nearest to their own target.

    A row's positive is its own target; its negatives are the group's other rows, or with negatives
    "batch" all other rows. same (B, G, G): pairs of a group that say the same are no negatives.
    """
    same = same & ~torch.eye(same.shape[1], dtype=torch.bool, device=same.device)
    if negatives == "batch":
        anchors, targets = anchors.flatten(0, 1)[None], targets.flatten(0, 1)[None]
        same = torch.block_diag(*same)[None]
    logits = anchors @ targets.transpose(1, 2) / CONTRAST_TEMPERATURE  # (B, G, G)
    logits = logits.masked_fill(same, -torch.inf)
    labels = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape[:2])
    accuracy = (logits.argmax(-1) == labels).float().mean()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), accuracy


class Strategist(Learner):
    """E, its momentum twin PSE and the predictor P, with what they remember and learn from."""
    encoder = BaseEncoder
    rate = LEARNING_RATE

    def __init__(self, size: int, config: Config, recent: int = RECENT):
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # leave the caller's random numbers alone
            torch.manual_seed(config.seed)
            self.make_networks(size)
        self.PSE.load_state_dict(self.E.state_dict())
        self.PSE.requires_grad_(False)
        self.query_norm = Standardise(size)
        self.response_norm = Standardise(size)
        self.recent = Replay(recent, **self.memory_shapes(size))
        self.outcomes = Replay(OUTCOMES, query=(size,), correct=(config.samples,))

    def make_networks(self, size: int) -> None:
        self.E = mlp(size, DIMENSION)
        self.PSE = mlp(size, DIMENSION)
        self.P = mlp(size, 1)

    def memory_shapes(self, size: int) -> dict[str, tuple]:
        G = self.config.samples
        return {"query": (size,), "response": (G, size), "views": (G, 2, size)}

    def expected(self, query: Tensor) -> Tensor:
        """z_pre (..., d): the strategy to expect of a query."""
        return F.normalize(self.E(self.query_norm(query)), dim=-1)

    @torch.no_grad()
    def achieved(self, response: Tensor) -> Tensor:
        """z_post (..., d): the strategy of a response, by the momentum head."""
        return F.normalize(self.PSE(self.response_norm(response)), dim=-1)

    def observe(self, features: Features, correct: Tensor) -> None:
        """Update statistics and memories with a batch, of which each rank has a share."""
        self.remember(features.gather(), parallel.gather(correct))

    def remember(self, features: Features, correct: Tensor) -> None:
        self.query_norm.update(features.query)
        self.response_norm.update(features.response)
        self.recent.add(**vars(features))
        self.outcomes.add(query=features.query, correct=correct)

    @torch.no_grad()
    def signals(self, features: Features, correct: Tensor, rollout: Rollout, problems: list,
                responses: list[str]) -> Signals:
        """What the rewards of a batch may look at. correct (B, G)."""
        success = self.P(self.query_norm(features.query)).sigmoid()  # (B, 1)
        return Signals(
            correct=correct, logprobs=rollout.logprobs.view(*correct.shape, -1),
            lengths=rollout.lengths.view_as(correct), problems=problems, responses=responses,
            features=features, z_pre=self.expected(features.query)[:, None],
            z_post=self.achieved(features.response), success=success)

    def loss(self, groups: Features, queries: Tensor, correct: Tensor) -> tuple[Tensor, dict]:
        """The strategy prediction loss and its parts. P learns from queries and correct (n, G)."""
        # E: halves of a response lie close, those of others far, and the whole near its halves.
        same, negatives = same_responses(groups.response), self.config.negatives
        states = torch.cat((groups.views, groups.response[:, :, None]), 2)  # (B, G, 3, D)
        first, second, whole = F.normalize(self.E(self.response_norm(states)), dim=-1).unbind(2)
        slow_first, slow_second, achieved = self.achieved(states).unbind(2)  # (B, G, d) each
        contrast, accuracy = info_nce(first, slow_second, same, negatives)
        mirrored, _ = info_nce(second, slow_first, same, negatives)
        alignment = 1 - (whole * (slow_first + slow_second) / 2).sum(-1).mean()
        # E(query): the strategy to expect is what the responses to this query do.
        expectation = 1 - (self.expected(groups.query)[:, None] * achieved).sum(-1).mean()
        logits = self.P(self.query_norm(queries)).expand_as(correct)  # P: how often was it solved?
        success = F.binary_cross_entropy_with_logits(logits, correct)
        total = (contrast + mirrored) / 2 + alignment + expectation + success
        losses = {"contrastive_loss": contrast, "contrastive_accuracy": accuracy,
                  "expectation_loss": expectation, "alignment_loss": alignment,
                  "success_loss": success}
        return total, {name: value.item() for name, value in losses.items()}

    def learn(self, updates: int, generator: torch.Generator) -> dict[str, float]:
        """Take `updates` minibatches -> the last one's losses."""
        losses = {}
        for _ in range(updates):
            groups = Features(**self.recent.sample(BATCH, generator))
            outcomes = self.outcomes.sample(BATCH * self.config.samples, generator)
            total, losses = self.loss(groups, outcomes["query"], outcomes["correct"])
            total.backward()
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            # One bad minibatch must not spoil the networks.
            if torch.nn.utils.get_total_norm([total.detach(), *gradients]).isfinite():
                self.optimizer.step()
                for slow, fast in zip(self.PSE.parameters(), self.E.parameters()):
                    slow.data.lerp_(fast.data, 1 - MOMENTUM)
            self.optimizer.zero_grad()
        return losses
