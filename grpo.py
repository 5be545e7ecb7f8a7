"""Group Relative Policy Optimization (Shao et al. 2024): advantages in groups, a clipped loss.

    A_i      = r_i - mean(r)                   over the G responses to one problem
    ratio_t  = pi(o_t) / pi_old(o_t)
    loss     = mean_t [ kl * k3_t - min(ratio_t A, clip(ratio_t, 1 - 0.2, 1 + 0.2) A) ]
    k3_t     = exp(ref_t - logp_t) - (ref_t - logp_t) - 1

k3 (Schulman 2020) is an unbiased, non-negative estimate of KL(pi || ref). Its *gradient* under
samples of pi is that of KL(ref || pi), which is mode-covering: it pulls the policy towards
everything that the base model does. k2 = d^2 / 2 with d = ref_t - logp_t has the gradient of
KL(pi || ref), which is mode-seeking.

Departures from the original: the advantage is not divided by std(r) by default (Dr. GRPO, Liu et
al. 2025), and every token of the batch weighs the same (DAPO, Yu et al. 2025). The weights are
fixed for the whole batch before it is cut into micro-batches, so the gradient does not depend on
the cut.
"""
import torch
from torch import Tensor

import lora
from model import SharedPrefix, Transformer
from sample import Rollout, pad_left
from support import parallel
from support.config import Config

CLIP = 0.2
MAX_LOG_RATIO = 20.0  # exp(20) is large and finite


def group_advantages(rewards: Tensor, normalise: str) -> Tensor:
    """rewards (B, G) -> advantages (B, G): better or worse than the mean of one's own group."""
    advantages = rewards - rewards.mean(1, keepdim=True)
    if normalise == "std":
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    # The mean of equal numbers may be off by a rounding error, which dividing by std would blow up.
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return advantages.masked_fill(equal, 0.0)


def score(model: Transformer, prompts: list[list[int]], ids: Tensor, mask: Tensor,
          temperature: float) -> Tensor:
    """Log-probabilities (N, T) of the responses `ids`, zero outside mask (N, T).

    N = len(prompts) * samples. Each prompt goes through the model once and all its responses attend
    to it: with n prompt tokens n + G * T tokens per group instead of G * (n + T), with equal values
    and gradients.
    """
    samples = len(ids) // len(prompts)
    prefix = SharedPrefix(samples)
    prompt_ids, start = pad_left(prompts, ids.device)
    last = model.hidden(prompt_ids, start, prefix)[:, -1:]  # (B, 1, D), predicts the first token
    last = last.repeat_interleave(samples, dim=0)  # (N, 1, D)
    rest = model.hidden(ids[:, :-1], start, prefix)  # (N, T - 1, D)
    hidden = torch.cat((last, rest), dim=1)[mask]  # (n, D)
    logprobs = model.logprobs(hidden, ids[mask], temperature)  # (n,)
    return torch.zeros(mask.shape, device=ids.device).masked_scatter(mask, logprobs)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref - logp, for each token."""
    difference = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2 with d = ref - logp, for each token."""
    return (reference - logprobs).square() / 2


PENALTIES = {"k3": k3, "k2": k2}


def kl_at(step: int, config: Config) -> float:
    """The KL weight falls geometrically to --kl-decay of itself."""
    return config.kl * config.kl_decay ** (step / config.steps)


def policy_loss(logprobs: Tensor, old: Tensor, reference: Tensor, advantages: Tensor,
                weights: Tensor, kl: float, penalty=k3) -> tuple[Tensor, Tensor]:
    """The loss, and where the clip took effect (N, T). All arguments (N, T), advantages (N, 1)."""
    ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
    objective = torch.minimum(unclipped, clipped)
    loss = kl * penalty(logprobs, reference) - objective
    return (loss * weights).sum(), unclipped > clipped


@torch.no_grad()
def reference_logprobs(model: Transformer, prompts: list[list[int]], rollout: Rollout,
                       config: Config) -> Tensor:
    """(N, T) under the base model: the same weights, adapters off."""
    samples, size, mask = len(rollout.ids) // len(prompts), config.micro_batch, rollout.mask()
    parts = []
    with lora.disabled(model):
        for b in range(0, len(prompts), size):
            rows = slice(b * samples, (b + size) * samples)
            parts.append(score(model, prompts[b:b + size], rollout.ids[rows], mask[rows],
                               config.temperature))
    return torch.cat(parts)


def accumulate_gradient(model: Transformer, prompts: list[list[int]], rollout: Rollout,
                        advantages: Tensor, config: Config, reference: Tensor | None = None,
                        old: Tensor | None = None) -> dict[str, float]:
    """Add the batch's policy gradient, of all ranks together, to the adapters -> metrics.

    advantages (B, G); reference, old (N, T). Without `old` the policy has not moved since it
    sampled: the ratio is exactly 1 and only carries the gradient. Without `reference` there is no
    KL term.
    """
    samples, size, mask = advantages.shape[1], config.micro_batch, rollout.mask()
    tokens = parallel.gather(rollout.lengths).sum()  # of all ranks
    weights = mask / tokens.clamp(min=1)  # (N, T)
    groups = list(range(len(prompts)))
    if not config.kl:  # without KL nothing flows from a group of zero advantage
        groups = advantages.ne(0).any(1).nonzero()[:, 0].tolist()
    rows_of = torch.arange(len(rollout.ids), device=mask.device).view(-1, samples)  # (B, G)
    metrics = dict.fromkeys(("loss", "kl", "clip_share", "mismatch", "scored"), 0.0)
    for i in range(0, len(groups), size):
        chosen = groups[i:i + size]
        rows = rows_of[chosen].flatten()
        T = max(int(rollout.lengths[rows].max()), 1)  # no columns of padding
        logprobs = score(model, [prompts[b] for b in chosen], rollout.ids[rows, :T], mask[rows, :T],
                         config.temperature)
        current = logprobs.detach()
        before = current if old is None else old[rows, :T]
        base = current if reference is None else reference[rows, :T]
        weight = weights[rows, :T]
        loss, clipped = policy_loss(logprobs, before, base, advantages[chosen].view(-1, 1), weight,
                                    config.kl, PENALTIES[config.kl_form])
        loss.backward()
        metrics["loss"] += loss.item()
        metrics["kl"] += (k3(current, base) * weight).sum().item()
        metrics["clip_share"] += (clipped * weight).sum().item()
        metrics["mismatch"] += ((current - rollout.logprobs[rows, :T]).abs() * weight).sum().item()
        metrics["scored"] += weight.sum().item()
    parallel.sum_gradients(list(lora.parameters(model).values()))
    ranks = parallel.gather_values(metrics)
    metrics = {name: sum(each[name] for each in ranks) for name in metrics}
    metrics["mismatch"] /= max(metrics.pop("scored"), 1e-9)  # of the tokens that were scored
    return metrics
