"""Rewards, in the paper's order: one equation, one pure function from tensors to a tensor.

    r = r_ext + alpha * r_int                      Eq. 1, behind a gate; --bonus added
    r = r_ext * w / mean(w), w = 1 + alpha * r_int                   the default, --bonus scaled
    r_int = lambda_SS * SS + lambda_SuS * SuS                        Eq. 4

The paper's text and its Algorithm 1 disagree about SS and SuS, so both readings are here:

                 --reading algorithm                    --reading equations
    SS           1 - cos(E(query), PSE(response))       cos(E(query), E(query, response))   Eq. 2
    SuS          |c - P(query)|                         |M(s, a) - s'| * (1 - SS)           Eq. 3

With --expectation group, the default, Algorithm 1's SS compares a response not with E(query) alone
but also with the group's other successes (expect_group).

METHODS maps each name of --method to a function (signals, config) -> r_int (B, G). Your own reward
needs no change here: `--method my_file:my_function` works too. Advantages are computed from r by
grpo.group_advantages. Nothing here carries a gradient or looks at true strategies.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from support import parallel
from support.config import Config, import_function

if TYPE_CHECKING:
    from strategy import Features


@dataclass(frozen=True)
class Signals:
    """What a method may look at; B problems, G responses each."""
    correct: Tensor  # (B, G) in {0, 1}
    logprobs: Tensor  # (B, G, T) of the sampled tokens, zero after the end
    lengths: Tensor  # (B, G) tokens in each response
    problems: list  # B, with prompt and judge
    responses: list[str]  # B * G
    features: "Features"  # mean-pooled states, as the encoder gives them
    z_pre: Tensor  # (B, 1, d) strategy expected of the query
    z_post: Tensor  # (B, G, d) strategy of the response (equations: of query and response)
    success: Tensor  # (B, 1) P(query)
    predicted: Tensor | None = None  # (B, G, D) M(s, a), only with --reading equations
    state: Tensor | None = None  # (B, G, D) s', only with --reading equations


Method = Callable[[Signals, Config], Tensor]


def correctness(problems: list, responses: list[str]) -> Tensor:
    """c (B, G) in {0, 1}: every problem judges its own responses."""
    samples = len(responses) // len(problems)
    judged = [problems[n // samples].judge(response) for n, response in enumerate(responses)]
    odd = [verdict for verdict in judged if verdict not in (0, 1)]
    if odd:
        raise ValueError(f"a judge gave {odd[0]!r}, expected 1.0 or 0.0")
    return torch.tensor(judged, dtype=torch.float32).view(len(problems), samples)


def strategy_stability(z_pre: Tensor, z_post: Tensor) -> Tensor:
    """Eq. 2: SS = cos(z_pre, z_post)."""
    return F.cosine_similarity(z_pre, z_post, dim=-1)


def strategy_surprise(predicted: Tensor, state: Tensor, ss: Tensor) -> Tensor:
    """Eq. 3: SuS = |M(s, a) - s'| (1 - SS)."""
    return (predicted - state).norm(dim=-1) * (1 - ss)


def strategy_shift(z_pre: Tensor, z_post: Tensor) -> Tensor:
    """Algorithm 1, line 9: SS = 1 - cos(z_pre, z_post)."""
    return 1 - F.cosine_similarity(z_pre, z_post, dim=-1)


def success_surprise(correct: Tensor, success: Tensor) -> Tensor:
    """Algorithm 1, line 10: SuS = |c - P(query)|."""
    return (correct - success).abs()


def mean_success_surprise(correct: Tensor, success: Tensor) -> float:
    """The mean SuS of the batch's correct responses, which --sus-baseline batch subtracts.

    As long as P knows nothing, every success surprises alike, and paying all of them only speeds up
    whatever the policy does already. Groups that are all right count, even where the gate `mixed`
    pays them nothing: they are what the policy is known to solve. All ranks must call this.
    """
    correct, success = parallel.gather(correct), parallel.gather(success)  # of all ranks
    surprise = success_surprise(correct, success)
    return ((surprise * correct).sum() / correct.sum().clamp(min=1)).item()


def other_successes(correct: Tensor) -> Tensor:
    """correct (B, G) -> (B, G, G): 1 where the column is another response's, and correct."""
    return correct[:, None, :] * (1 - torch.eye(correct.shape[1], device=correct.device))


def expect_group(z_pre: Tensor, z_post: Tensor, correct: Tensor) -> Tensor:
    """--expectation group: z_pre (B, G, d) = E(query) plus z_post of the group's other successes.

    So a way is unexpected if few correct responses to the same query go it, and E(query) counts as
    one response. SS ignores the length of z_pre, so the sum stands for the mean.
    """
    return z_pre + other_successes(correct) @ z_post


def parts(signals: Signals, config: Config) -> tuple[Tensor, Tensor]:
    """SS and SuS (B, G) in the reading that was asked for."""
    z_pre, z_post, correct = signals.z_pre, signals.z_post, signals.correct
    if config.reading == "algorithm":
        if config.expectation == "group":
            z_pre = expect_group(z_pre, z_post, correct)
        return strategy_shift(z_pre, z_post), success_surprise(correct, signals.success)
    ss = strategy_stability(z_pre, z_post)
    return ss, strategy_surprise(signals.predicted, signals.state, ss)


def paid_parts(signals: Signals, config: Config) -> tuple[Tensor, Tensor]:
    """SS and SuS as they are rewarded: SuS minus its mean over the batch's correct responses."""
    ss, sus = parts(signals, config)
    if config.reading == "algorithm" and config.sus_baseline == "batch":
        sus = sus - mean_success_surprise(signals.correct, signals.success)
    return ss, sus


def sus(signals: Signals, config: Config) -> Tensor:
    """Eq. 4: r_int = lambda_SS SS + lambda_SuS SuS."""
    ss, surprise = paid_parts(signals, config)
    return config.lambda_ss * ss + config.lambda_sus * surprise


def ss_only(signals: Signals, config: Config) -> Tensor:
    """The paper's ablation without SuS."""
    return config.lambda_ss * parts(signals, config)[0]


def sus_only(signals: Signals, config: Config) -> Tensor:
    """The paper's ablation without SS."""
    return config.lambda_sus * paid_parts(signals, config)[1]


def perplexity(signals: Signals, config: Config) -> Tensor:
    """The paper's baseline: exp(- mean log-probability of the response's tokens)."""
    return (-signals.logprobs.sum(-1) / signals.lengths.clamp(min=1)).clamp(max=20).exp()


def no_bonus(signals: Signals, config: Config) -> Tensor:
    """Plain GRPO: METHODS needs the name; train.py never calls this."""
    return torch.zeros_like(signals.correct)


METHODS: dict[str, Method] = {"sus": sus, "ss": ss_only, "surprise": sus_only,
                              "perplexity": perplexity, "grpo": no_bonus}


def find_method(name: str) -> Method:
    """A name of METHODS, or `module:name` of a function or of a class, for a reward with a memory.

    A class is made by train.py with (size of the features, config), and its state is checkpointed.
    """
    found = METHODS.get(name) or import_function("--method", name, ", ".join(METHODS))
    if isinstance(found, type) and not issubclass(found, nn.Module):
        raise ValueError(f"--method {name}: a class must be an nn.Module")
    return found


def gate(correct: Tensor, name: str) -> Tensor:
    """Which responses may earn a bonus, (B, G) in {0, 1}.

    correct    correct responses (Algorithm 1, line 12)
    mixed      correct responses of groups that are neither all right nor all wrong: a group without
               extrinsic signal keeps advantages of exactly zero
    group      all responses of such groups
    none       every response
    """
    if name == "none":
        return torch.ones_like(correct)
    if name == "correct":
        return correct
    is_mixed = correct.amax(1, keepdim=True) != correct.amin(1, keepdim=True)
    return correct * is_mixed if name == "mixed" else is_mixed.float().expand_as(correct)


def alpha_at(step: int, config: Config) -> float:
    """alpha falls linearly to zero over the first --alpha-decay of the run; 0 keeps it constant."""
    if not config.alpha_decay:
        return config.alpha
    return config.alpha * max(0.0, 1.0 - step / (config.alpha_decay * config.steps))


def augment(correct: Tensor, intrinsic: Tensor, config: Config, step: int) -> Tensor:
    """Eq. 1: r = r_ext + alpha r_int, where the gate is open.

    --bonus scaled: responses that earn have r = r_ext w / mean(w), w = 1 + alpha r_int but not
    below 0, with the mean over all of them; the others keep r_ext. A bonus that multiplies rewards
    weakens the KL penalty, since AdamW ignores the scale of a loss; these weights only
    redistribute, so that the penalty keeps its meaning.
    """
    if not isinstance(intrinsic, Tensor) or intrinsic.shape != correct.shape:
        raise ValueError(f"--method {config.method} gave {getattr(intrinsic, 'shape', intrinsic)}, "
                         f"expected a tensor of shape {tuple(correct.shape)}")
    intrinsic = intrinsic.detach().to(correct)
    earns = gate(correct, config.gate) > 0
    bonus = alpha_at(step, config) * torch.where(earns, intrinsic, 0.0)
    if not bonus.isfinite().all():
        raise ValueError(f"--method {config.method} gave a number that is not finite")
    if config.bonus == "added":
        return correct + bonus
    weights = (1 + bonus).clamp(min=0.0)  # no correct response earns less than a wrong one
    paid = parallel.gather(weights[earns])
    scale = paid.mean() if paid.any() else 1.0
    return correct * torch.where(earns, weights / scale, 1.0)


def bonus_share(advantages: Tensor, extrinsic: Tensor) -> float:
    """The share of the advantages' variance that correctness does not explain."""
    a = advantages.flatten() - advantages.mean()
    b = extrinsic.flatten() - extrinsic.mean()
    if not a.any():
        return 0.0
    return 1.0 - ((a @ b).square() / (a @ a * (b @ b)).clamp(min=1e-12)).item()
