"""Rewards, in the paper's order: one equation, one pure function from tensors to a tensor.

    r = r_ext + alpha * r_int                                    Eq. 1, behind a gate
    r_int = lambda_SS * SS + lambda_SuS * SuS                    Eq. 4

The paper's text and its Algorithm 1 disagree about SS and SuS, so both readings are here:

                 --reading algorithm                     --reading equations
    SS           1 - cos(E(query), PSE(response))        cos(E(query), E(query and response))    Eq. 2
    SuS          |c - P(query)|                          |M(s, a) - s'| * (1 - SS)               Eq. 3

METHODS maps each name of `--method` to a function of Signals that returns r_int (B, G). To add your own, write
one function and one entry. Scoring never normalises: that is grpo.group_advantages' work. Nothing here carries a
gradient, and of all methods only `oracle` looks at true strategies.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Signals:
    """What a method may look at; B problems, G responses each."""
    correct: Tensor                 # (B, G) in {0, 1}
    logprobs: Tensor                # (B, G, T) of the sampled tokens, zero after the end
    lengths: Tensor                 # (B, G)
    z_pre: Tensor                   # (B, G, d) strategy expected of the query
    z_post: Tensor                  # (B, G, d) strategy of the response (equations: of query and response)
    success: Tensor                 # (B, 1) P(query)
    predicted: Tensor               # (B, G, D) M(s, a)
    state: Tensor                   # (B, G, D) s'
    distillation: Tensor            # (B, G) RND's error
    cluster: Tensor                 # (B, G) cluster of the response's embedding
    cluster_share: Tensor           # (B, G) running share of that cluster
    strategy_share: Tensor          # (B, G) running share of the true strategy: the oracle's
    reading: str = "algorithm"
    lambda_ss: float = 1.0
    lambda_sus: float = 0.5
    usual: float = 0.0              # SuS of the batch's average success, from which SuS is counted; 0 in the paper


def correctness(problems: list, responses: list[str]) -> Tensor:
    """c (B, G) in {0, 1}: every problem judges its own responses, which come in its row's order."""
    samples = len(responses) // len(problems)
    judged = [problems[n // samples].judge(response) for n, response in enumerate(responses)]
    return torch.tensor(judged, dtype=torch.float32).view(len(problems), samples)


def stability(z_pre: Tensor, z_post: Tensor) -> Tensor:
    """Eq. 2: SS = cos(z_pre, z_post)."""
    return F.cosine_similarity(z_pre, z_post, dim=-1)


def surprise(predicted: Tensor, state: Tensor, stability: Tensor) -> Tensor:
    """Eq. 3: SuS = |M(s, a) - s'| (1 - SS)."""
    return (predicted - state).norm(dim=-1) * (1 - stability)


def shift(z_pre: Tensor, z_post: Tensor) -> Tensor:
    """Algorithm 1, line 9: SS = 1 - cos(z_pre, z_post)."""
    return 1 - F.cosine_similarity(z_pre, z_post, dim=-1)


def success_surprise(correct: Tensor, probability: Tensor) -> Tensor:
    """Algorithm 1, line 10: SuS = |c - P(query)|."""
    return (correct - probability).abs()


def combine(ss: Tensor, sus: Tensor, lambda_ss: float, lambda_sus: float) -> Tensor:
    """Eq. 4: r_int = lambda_SS SS + lambda_SuS SuS."""
    return lambda_ss * ss + lambda_sus * sus


def gate(correct: Tensor, name: str) -> Tensor:
    """Which responses may earn a bonus (B, G): `correct` ones (Algorithm 1, line 12); `mixed`, those of groups that
    are neither all right nor all wrong; `none`, every response. Under `mixed` a group without extrinsic signal keeps
    advantages of exactly zero; under the others its bonus alone decides."""
    if name == "none":
        return torch.ones_like(correct)
    if name == "mixed":
        return correct * (correct.amax(1, keepdim=True) != correct.amin(1, keepdim=True))
    return correct


def augment(extrinsic: Tensor, intrinsic: Tensor, alpha: float, open: Tensor) -> Tensor:
    """Eq. 1: r = r_ext + alpha r_int, where the gate is open."""
    return extrinsic + alpha * torch.where(open > 0, intrinsic, 0.0)


def alpha_at(step: int, steps: int, alpha: float, decay: float) -> float:
    """alpha falls linearly to zero over the first `decay` of the run, so it ends on the task's own reward."""
    return alpha * max(0.0, 1.0 - step / (decay * steps)) if decay else alpha


def parts(signals: Signals) -> tuple[Tensor, Tensor]:
    """SS and SuS in the reading that was asked for."""
    if signals.reading == "algorithm":
        return shift(signals.z_pre, signals.z_post), success_surprise(signals.correct, signals.success)
    ss = stability(signals.z_pre, signals.z_post)
    return ss, surprise(signals.predicted, signals.state, ss)


def usual_surprise(correct: Tensor, probability: Tensor) -> float:
    """The mean SuS of the batch's correct responses. As long as P knows nothing, every success surprises alike: paying that
    to all of them would only speed up whatever the policy does already. Counted from this mean, a success on a problem that
    the policy is known to fail earns, one on a problem that it is known to solve pays for it.
    (Groups that are all right count too, though the gate `mixed` pays them nothing: they are what the policy is known to solve.)"""
    return ((success_surprise(correct, probability) * correct).sum() / correct.sum().clamp(min=1)).item()


def paid(signals: Signals) -> tuple[Tensor, Tensor]:
    """The two parts as they are rewarded."""
    ss, sus = parts(signals)
    return ss, sus - signals.usual


def sus(signals: Signals) -> Tensor:
    return combine(*paid(signals), signals.lambda_ss, signals.lambda_sus)


def perplexity(signals: Signals) -> Tensor:
    """The paper's baseline: exp(- mean log-probability of the response's tokens)."""
    return (-signals.logprobs.sum(-1) / signals.lengths.clamp(min=1)).clamp(max=20).exp()


def forward_error(signals: Signals) -> Tensor:
    """ICM (Pathak et al. 2017): how far the forward model misses the next state's features."""
    return (signals.predicted - signals.state).norm(dim=-1)


def pseudo_count(signals: Signals) -> Tensor:
    """Count-based (Bellemare et al. 2016): 1 / sqrt(n), with the cluster's share of recent responses for n."""
    return signals.cluster_share.clamp(min=1e-6).rsqrt()


def novelty(signals: Signals) -> Tensor:
    """Mean distance 1 - cos of a response's embedding to those of the group's other correct responses."""
    distance = 1 - F.normalize(signals.z_post, dim=-1) @ F.normalize(signals.z_post, dim=-1).transpose(1, 2)   # (B, G, G)
    others = signals.correct[:, None, :] * (1 - torch.eye(signals.correct.shape[1], device=distance.device))
    return (distance * others).sum(-1) / others.sum(-1).clamp(min=1)


def uniqueness(signals: Signals) -> Tensor:
    """Uniqueness-aware (Hu et al. 2026): 1 / the number of the group's correct responses in one's own cluster."""
    same = (signals.cluster[:, :, None] == signals.cluster[:, None, :]) * signals.correct[:, None, :]          # (B, G, G)
    return 1 / same.sum(-1).clamp(min=1)


def rarity(signals: Signals) -> Tensor:
    """- log of the true strategy's running share. A ceiling to compare with, never a method to use."""
    return -signals.strategy_share.log()


METHODS = {
    "grpo": lambda signals: torch.zeros_like(signals.correct),
    "perplexity": perplexity,
    "ss": lambda signals: signals.lambda_ss * paid(signals)[0],
    "surprise": lambda signals: signals.lambda_sus * paid(signals)[1],
    "sus": sus,
    "rnd": lambda signals: signals.distillation,            # Burda et al. 2018
    "icm": forward_error,
    "count": pseudo_count,
    "novelty": novelty,
    "uniqueness": uniqueness,
    "oracle": rarity,
}
