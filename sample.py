"""Sampling: several responses to each of several prompts, from the distribution that training scores.

Each prompt is read once and its keys and values are shared by its samples; rows leave the batch as they
finish; the adapters are merged into the weights that decode (decode.py). There is no top-k, no top-p and no
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

from decode import Decoder
from model import ModelConfig, SharedPrefix, Transformer

BLOCK = 128                             # tokens of the vocabulary that are summed at a time


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
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    probabilities, padding = F.softmax(logits, dim=-1), -logits.shape[1] % BLOCK
    # Inverse transform sampling: one random number a row where multinomial draws V of them. First the block of the
    # vocabulary, then the token in it, so that sums in fp64 are short.
    blocks = F.pad(probabilities, (0, padding)) if padding else probabilities                    # to pad is to copy
    blocks = blocks.unflatten(1, (-1, BLOCK))                                                    # (n, V / BLOCK, BLOCK)
    wide = wide_dtype(logits.device)
    sums = blocks.sum(2).to(wide)
    total = sums.sum(1, keepdim=True)
    if not total.isfinite().all():
        raise FloatingPointError("the model's logits are not finite: its weights may be damaged, or the learning rate too high")
    block, rest = find(sums, uniform[:, None].to(wide) * total)
    token, _ = find(blocks[torch.arange(len(blocks), device=block.device), block[:, 0]].to(wide), rest)
    tokens = block * BLOCK + token
    return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log()


def wide_dtype(device: torch.device) -> torch.dtype:
    """fp64, so that no token's probability is lost in a sum; mps has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def find(weights: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """weights (n, K) laid end to end, place (n, 1) -> the weight at this place, never one that is zero, and the place in it."""
    ends = weights.cumsum(1)
    place = torch.minimum(place.clamp(min=0), ends[:, -1:].nextafter(torch.zeros_like(place)))
    index = torch.searchsorted(ends, place, right=True)
    return index, place - (ends - weights).gather(1, index)


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
    uniform = torch.rand(max_new_tokens, N, generator=generator, dtype=torch.float64).to(device, wide_dtype(device))
    with torch.inference_mode():
        prefix, (prompt_ids, start) = SharedPrefix(samples), pad_left(prompts, device)
        last = model.hidden(prompt_ids, start, prefix)[:, -1]                                    # (prompts, D)
        logits = F.linear(last, model.head).repeat_interleave(samples, dim=0)                    # (N, V)
        decoder = Decoder(model, prefix, start, samples, max_new_tokens)
        del prefix                                          # the decoder has its own copy
        rows = torch.arange(N, device=device).view(-1, samples)                              # (B, G), the rows still decoded
        for t in range(max_new_tokens):
            flat = rows.flatten()
            tokens, ids_logprobs = draw(logits, temperature, uniform[t, flat])                   # (B * G,) each
            ids[flat, t], logprobs[flat, t] = tokens, ids_logprobs
            ended = flat[(tokens[:, None] == ends).any(1) & ~finished[flat]]
            if len(ended):
                lengths[ended], finished[ended] = t + 1, True
                if finished.all():
                    break
                rows, kept = shrink(rows, ~finished[rows], decoder)
                tokens = tokens[kept]
            if t + 1 < max_new_tokens:
                logits = decoder.step(tokens.view_as(rows))                                  # (B * G, V)
    rollout = Rollout(ids, lengths, logprobs, finished)
    ids[~rollout.mask()], logprobs[~rollout.mask()] = 0, 0              # what finished rows were given while they waited
    T = int(lengths.max())
    return Rollout(ids[:, :T], lengths, logprobs[:, :T], finished)


def shrink(rows: Tensor, alive: Tensor, decoder: Decoder) -> tuple[Tensor, Tensor]:
    """rows, alive (B, G) -> the smallest rectangle of rows (B', G') that has all living ones, and its places among B * G.

    Finished groups leave, and of the others as many responses as the largest still has: a finished one may wait a while.
    """
    B, G = rows.shape
    counts = alive.sum(1)
    groups, width = counts.nonzero()[:, 0], int(counts.max())
    columns = (~alive[groups]).long().argsort(dim=1, stable=True)[:, :width]                     # the living first
    if columns.numel() < rows.numel():
        decoder.keep(groups, columns)
    else:
        groups, columns = torch.arange(B, device=rows.device), torch.arange(G, device=rows.device).expand(B, G)
    return rows[groups].gather(1, columns), (groups[:, None] * G + columns).flatten()


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
