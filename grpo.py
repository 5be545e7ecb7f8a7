"""Group Relative Policy Optimization (Shao et al. 2024): advantages inside groups, a clipped policy loss.

    A_i      = (r_i - mean(r)) / std(r)                over the G responses to one problem   [normalise std]
    ratio_t  = pi(o_t) / pi_old(o_t)
    loss     = - sum_t w_t min(ratio_t A, clip(ratio_t, 1 - low, 1 + high) A) + kl * sum_t w_t k3_t
    k3_t     = exp(ref_t - logp_t) - (ref_t - logp_t) - 1            an unbiased, non-negative estimate of KL

The weights w_t are fixed for the whole batch before it is cut into micro-batches, so the gradient is the same
however it is cut. Departures from the original, each a flag: mean-centred advantages (`none`) and the
`constant` weighting of Dr. GRPO (Liu et al. 2025), the `token` weighting and the separate upper clip of DAPO
(Yu et al. 2025).

`score` is where the time goes. It reads each prompt once for its whole group, lets the responses attend to
it, and projects onto the vocabulary only at response positions, a chunk at a time. `score_naive` is the same
function as one would write it first: tests hold the two together. Called by train.py once a step.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

import lora
import parallel
from model import SharedPrefix, Transformer
from sample import Rollout, pad_left

LOGITS_AT_ONCE = 2 ** 23                # at most this many logits exist at a time: 32 MB in fp32
MAX_LOG_RATIO = 20.0                    # exp(20) is large and finite


def group_advantages(rewards: Tensor, normalise: str) -> Tensor:
    """rewards (B, G) -> advantages (B, G): above or below the mean of one's own group."""
    advantages = rewards - rewards.mean(1, keepdim=True)
    if normalise == "std":
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    elif normalise != "none":
        raise ValueError(f"normalise is {normalise!r}, expected std or none")
    # The mean of equal numbers may be off by a rounding error, which a division by a tiny deviation would blow up.
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return advantages.masked_fill(equal, 0.0)


def unexplained(advantages: Tensor, extrinsic: Tensor) -> float:
    """The share of the advantages' variance that correctness alone does not explain: 1 - correlation^2."""
    a, b = advantages.flatten() - advantages.mean(), extrinsic.flatten() - extrinsic.mean()
    if not a.any():
        return 0.0
    return 1.0 - ((a @ b).square() / (a @ a * (b @ b)).clamp(min=1e-12)).item()


def token_weights(lengths: Tensor, max_new_tokens: int, normalise: str, whole: Tensor | None = None) -> Tensor:
    """lengths (N,) -> the weight w (N,) of each response's tokens in the batch's loss.

    token: every token counts the same; sequence: every response does; constant: a fixed length divides all.
    whole: the lengths of all responses, when these are but one rank's share of the batch.
    """
    whole = lengths if whole is None else whole
    if normalise == "token":
        return torch.full(lengths.shape, 1.0 / max(int(whole.sum()), 1), device=lengths.device)
    if normalise == "sequence":
        return 1.0 / (len(whole) * lengths.clamp(min=1).float())
    if normalise == "constant":
        return torch.full(lengths.shape, 1.0 / (len(whole) * max_new_tokens), device=lengths.device)
    raise ValueError(f"loss normalisation is {normalise!r}, expected token, sequence or constant")


class TargetLogprobs(torch.autograd.Function):
    """hidden (n, D), head (V, D), targets (n,) -> log-probability of each target (n,), in fp32.

    A chunk of rows at a time, so that never more than LOGITS_AT_ONCE logits exist. The head is frozen, so all that backward
    needs is d logp / d hidden = (onehot(target) - softmax(logits)) head / temperature, (n, D), and it is made on the way: no
    logits are kept, and none are computed twice.
    """
    @staticmethod
    def forward(ctx, hidden, head, targets, temperature):
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        size = max(1, LOGITS_AT_ONCE // len(head))
        room = head.new_empty(min(size, len(hidden)), len(head))                                 # new memory is slow to touch
        for i in range(0, len(hidden), size):
            rows, target = slice(i, i + size), targets[i:i + size]
            logits = torch.mm(hidden[rows], head.t(), out=room[:len(target)]).float().div_(temperature)      # (size, V)
            total = logits.logsumexp(1)
            logprobs[rows] = logits.gather(1, target[:, None])[:, 0] - total
            if slopes is not None:
                slope = logits.sub_(total[:, None]).exp_()                                       # softmax - onehot, in fp32:
                slope[torch.arange(len(target), device=target.device), target] -= 1              # for a sure token a small difference
                slopes[rows] = slope.to(head.dtype) @ head / -temperature
        ctx.save_for_backward(slopes)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        slopes, = ctx.saved_tensors
        return grad[:, None].to(slopes.dtype) * slopes, None, None, None


def score(model: Transformer, prompts: list[list[int]], ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Log-probabilities (N, T) of the responses `ids`, zero outside mask (N, T); N = len(prompts) * samples.

    P + G * T tokens go through the model for a group, not G * (P + T), with equal values and gradients.
    """
    samples = len(ids) // len(prompts)
    prompt_ids, start = pad_left(prompts, ids.device)
    prefix = SharedPrefix(samples)
    last = model.hidden(prompt_ids, start, prefix)[:, -1:].repeat_interleave(samples, dim=0)     # (N, 1, D)
    start = None if start is None else start.repeat_interleave(samples)
    rest = model.hidden(ids[:, :-1], start, prefix)                                              # (N, T - 1, D)
    hidden = torch.cat((last, rest), dim=1)[mask]                                                # (n, D)
    logprobs = TargetLogprobs.apply(hidden, model.head, ids[mask], temperature)
    return torch.zeros(mask.shape, device=ids.device).masked_scatter(mask, logprobs)


def score_naive(model: Transformer, prompts: list[list[int]], ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """The same from whole sequences: every prompt repeated for every response, every logit kept."""
    samples = len(ids) // len(prompts)
    prompt_ids, start = pad_left([prompt for prompt in prompts for _ in range(samples)], ids.device)
    logits = model(torch.cat((prompt_ids, ids), dim=1), start)[:, prompt_ids.shape[1] - 1:-1]    # (N, T, V)
    logprobs = F.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(2, ids[..., None])[..., 0] * mask


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's estimate of KL(pi || ref) a token: exp(d) - d - 1 with d = ref - logp."""
    difference = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1


def clipped_objective(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-> min(ratio A, clip(ratio) A) a token, and where the clip took effect. logprobs, old (N, T); advantages (N, 1)."""
    ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return torch.minimum(ratio * advantages, clipped * advantages), ratio * advantages > clipped * advantages


@dataclass(frozen=True)
class LossSettings:
    """The knobs of the policy loss, as train.py's flags explain them."""
    temperature: float = 1.0
    kl: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    normalise: str = "token"
    max_new_tokens: int = 24
    micro_batch: int = 8                # problems that go through the model at a time


@torch.no_grad()
def reference_logprobs(model: Transformer, prompts: list[list[int]], rollout: Rollout, settings: LossSettings) -> Tensor:
    """(N, T) under the base model: the same weights, adapters off."""
    samples, mask, size = len(rollout.ids) // len(prompts), rollout.mask(), settings.micro_batch
    parts = []
    with lora.disabled(model):
        for b in range(0, len(prompts), size):
            rows = slice(b * samples, (b + size) * samples)
            parts.append(score(model, prompts[b:b + size], rollout.ids[rows], mask[rows], settings.temperature))
    return torch.cat(parts)


def accumulate_gradient(model: Transformer, prompts: list[list[int]], rollout: Rollout, advantages: Tensor,
                        settings: LossSettings, reference: Tensor | None = None, old: Tensor | None = None) -> dict[str, float]:
    """Give the adapters the batch's policy gradient, all ranks' shares together -> metrics. advantages (B, G); reference,
    old (N, T). The adapters must come without gradients.

    old=None: the policy has not moved since it sampled, so the ratio is exactly 1 and only carries the gradient.
    """
    samples, size, mask = advantages.shape[1], settings.micro_batch, rollout.mask()
    whole = parallel.gather(rollout.lengths)
    weights = token_weights(rollout.lengths, settings.max_new_tokens, settings.normalise, whole)[:, None] * mask   # (N, T)
    share = mask / whole.sum().clamp(min=1)                 # for means over the batch's tokens
    groups = list(range(len(prompts)))
    if not settings.kl:                                     # without KL nothing flows from a group of zero advantage
        groups = advantages.ne(0).any(1).nonzero()[:, 0].tolist()
    rows_of = torch.arange(len(rollout.ids), device=mask.device).view(-1, samples)                          # (B, G)
    metrics = {"loss": 0.0, "kl": 0.0, "clip_share": 0.0}
    for chosen in (groups[i:i + size] for i in range(0, len(groups), size)):
        rows = rows_of[chosen].flatten()
        T = max(int(rollout.lengths[rows].max()), 1)        # no columns of padding
        ids, seen = rollout.ids[rows, :T], mask[rows, :T]
        logprobs = score(model, [prompts[b] for b in chosen], ids, seen, settings.temperature)
        objective, clipped = clipped_objective(logprobs, logprobs.detach() if old is None else old[rows, :T],
                                               advantages[chosen].view(-1, 1), settings.clip_low, settings.clip_high)
        kl = k3(logprobs, logprobs.detach() if reference is None else reference[rows, :T])
        loss = ((settings.kl * kl - objective) * weights[rows, :T]).sum()
        loss.backward()
        metrics["loss"] += loss.item()
        metrics["kl"] += (kl.detach() * share[rows, :T]).sum().item()
        metrics["clip_share"] += (clipped * share[rows, :T]).sum().item()
    parallel.sum_gradients(lora.parameters(model).values())
    return parallel.total(metrics)
