"""What networks remember while they learn: statistics, the newest rows, their optimizer.

All are modules whose state_dict holds everything, so it is a complete checkpoint.
"""
import torch
import torch.nn as nn
from torch import Tensor

from support import files

STANDARDISE_ROWS = 20_000  # how many rows the running statistics remember


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


class Learner(nn.Module):
    """Networks with an optimizer of their own, whose moments are a part of the state_dict."""

    def make_optimizer(self, rate: float) -> None:
        learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, lr=rate, fused=True)

    def get_extra_state(self) -> Tensor:
        return files.pack_optimizer(self.optimizer)

    def set_extra_state(self, state: Tensor) -> None:
        files.unpack_optimizer(self.optimizer, state)
