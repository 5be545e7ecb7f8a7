"""Sampling: several responses to each of several prompts, from the distribution that training scores.

Each prompt is read once and its keys and values are shared by its samples; rows leave the batch as they
finish; the adapters are merged into the weights for the duration. There is no top-k, no top-p and no
repetition penalty, here or inherited from a generation_config, so the log-probability kept for each token is
the one that `grpo.score` recomputes: up to rounding, which on a bf16 base includes that of the merged weights.

Random numbers: one uniform number a row and step, always drawn for all rows, so a response depends on the
seed and on its own row, not on when its neighbours finish. Called by train.py and evaluate.py.
"""
import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import lora
from model import Cache, ModelConfig, Transformer


@dataclass
class Rollout:
    """N = prompts * samples responses; row n answers prompt n // samples."""
    ids: Tensor         # (N, T) response tokens, zero after the end
    lengths: Tensor     # (N,) tokens in the response, its end token included
    logprobs: Tensor    # (N, T) of each token under the sampling distribution, zero after the end
    finished: Tensor    # (N,) False where max_new_tokens cut the response off

    def mask(self) -> Tensor:
        """(N, T), True on response tokens; from the lengths, since any id may occur inside a response."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]


def seeded(*key) -> torch.Generator:
    """Random numbers that follow from the key alone, such as (seed, use, step), and are unlike those of any other key."""
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def pad_left(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """-> ids (B, P) and each row's first real slot (B,), None when nothing is padded."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    start = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    return ids, start if any(len(prompt) != width for prompt in prompts) else None


def draw(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """logits (n, V), uniform (n,) in [0, 1) -> tokens (n,) and their log-probabilities (n,)."""
    if temperature == 0:
        return logits.argmax(-1), logits.new_zeros(len(logits), dtype=torch.float32)
    logprobs = F.log_softmax(logits.float() / temperature, dim=-1)
    # Inverse transform sampling: thirty times faster on a CPU than multinomial's V random numbers a row.
    # In fp64 (mps has none) no token's probability is lost in the sum, and rounding cannot reach past its end.
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float32 if logits.device.type == "mps" else torch.float64)
    total = cumulative[:, -1:]
    if not total.isfinite().all():
        raise FloatingPointError("the model's logits are not finite: its weights may be damaged, or the learning rate too high")
    threshold = torch.minimum(uniform[:, None].to(cumulative) * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def generate(model: Transformer, prompts: list[list[int]], samples: int, max_new_tokens: int, temperature: float,
             eos_ids: tuple[int, ...], generator: torch.Generator) -> Rollout:
    """Sample `samples` responses of at most max_new_tokens for each prompt. The generator lives on the CPU."""
    check(prompts, samples, max_new_tokens, temperature, model.config)
    device, N = model.device, len(prompts) * samples
    ids = torch.zeros(N, max_new_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(N, max_new_tokens, device=device)
    lengths = torch.full((N,), max_new_tokens, device=device)
    finished = torch.zeros(N, dtype=torch.bool, device=device)
    ends = torch.tensor(eos_ids, device=device)
    with torch.inference_mode(), lora.merged(model):
        cache = Cache()
        prompt_ids, start = pad_left(prompts, device)
        hidden = model.hidden(prompt_ids, start, cache)[:, -1]                   # (B, D)
        rows = torch.arange(N, device=device)                                    # the unfinished responses
        cache.select(rows // samples)
        hidden, start = hidden[rows // samples], None if start is None else start[rows // samples]
        for t in range(max_new_tokens):
            uniform = torch.rand(N, generator=generator, dtype=torch.float64)[rows.cpu()].to(device)
            tokens, token_logprobs = draw(F.linear(hidden, model.head), temperature, uniform)
            ids[rows, t], logprobs[rows, t] = tokens, token_logprobs
            ended = torch.isin(tokens, ends)
            lengths[rows[ended]], finished[rows[ended]] = t + 1, True
            if ended.any():
                alive = (~ended).nonzero()[:, 0]
                rows, tokens = rows[alive], tokens[alive]
                if not len(rows):
                    break
                cache.select(alive)
                start = None if start is None else start[alive]
            if t + 1 < max_new_tokens:
                hidden = model.hidden(tokens[:, None], start, cache)[:, 0]       # (n, D)
    T = int(lengths.max())
    return Rollout(ids[:, :T], lengths, logprobs[:, :T], finished)


def check(prompts: list[list[int]], samples: int, max_new_tokens: int, temperature: float, config: ModelConfig) -> None:
    """Every way in which a request to sample can be impossible, as one clear error."""
    if not prompts or not all(prompts):
        raise ValueError("there is no prompt to sample from, or an empty one: each needs at least one token")
    if samples < 1 or max_new_tokens < 1 or not temperature >= 0:
        raise ValueError(f"samples {samples} and max_new_tokens {max_new_tokens} must be at least 1 and "
                         f"temperature {temperature} not negative")
    largest = max(map(max, prompts))
    if largest >= config.vocab_size:
        raise ValueError(f"a prompt has token {largest}, the model knows {config.vocab_size}: the tokenizer is another model's")
    longest, context = max(map(len, prompts)), config.context
    if longest + max_new_tokens > context:
        raise ValueError(f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's context "
                         f"of {context}: shorten the prompts or lower the number of new tokens")
