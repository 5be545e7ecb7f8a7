"""Learned weights (paper, Section 3.5: the coefficients are "meta-learned"): lambda_SS and lambda_SuS by meta-gradient.

After a policy step theta' = theta - eta (g_ext + alpha (lambda_SS g_SS + lambda_SuS g_SuS)), where g_i is the gradient
of the policy loss with advantages from reward part i alone, the extrinsic loss on the *next* batch changes by

    d L_ext(theta') / d lambda_i  =  - eta alpha < g_ext(next batch), g_i(this batch) >

so a part whose gradient agrees with what the task wants next gains weight, and one that works against it loses
weight (LIRPG, Zheng et al. 2018, for one step). The paper does not say how it meta-learns; this is the shortest honest
way. The inner product is taken as a cosine, which frees the step size from the scale of the gradients, and the weights
are softplus(raw), hence positive. It costs three extra backward passes every --lambda-every steps.
"""
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import grpo
import lora


class LearnedWeights:
    def __init__(self, lambda_ss: float, lambda_sus: float, learning_rate: float):
        values = torch.tensor([lambda_ss, lambda_sus]).clamp(min=1e-3)   # softplus never reaches zero
        self.raw = values + (-(-values).expm1()).log()                  # inverse softplus, stable for large values
        self.learning_rate, self.pending = learning_rate, None                                   # (2, n) part gradients

    def values(self) -> tuple[float, float]:
        return tuple(F.softplus(self.raw).tolist())

    def step(self, model, prompts: list, rollout, correct: Tensor, parts: list[Tensor], rewards: Tensor, normalise: str,
             settings: grpo.LossSettings) -> None:
        """On one batch remember what each part of the bonus pulls at; on the next ask the task about it."""
        settings = replace(settings, kl=0.0)
        if self.pending is None:
            self.pending = torch.stack([
                policy_gradient(model, prompts, rollout, part_advantages(part, rewards, normalise), settings) for part in parts])
        else:
            self.learn(policy_gradient(model, prompts, rollout, grpo.group_advantages(correct, normalise), settings))

    def learn(self, extrinsic: Tensor) -> None:
        """extrinsic (n,): the gradient of the task's own loss on the batch after the remembered one."""
        agreement = F.cosine_similarity(self.pending, extrinsic[None], dim=1).cpu()              # (2,)
        if agreement.isfinite().all():                      # one bad batch must not spoil the weights for good
            self.raw += self.learning_rate * agreement * self.raw.sigmoid()
        self.pending = None


def part_advantages(part: Tensor, rewards: Tensor, normalise: str) -> Tensor:
    """What one part (B, G) of the rewards contributes to their advantages: linear, with the deviation of the whole."""
    centred = part - part.mean(1, keepdim=True)
    if normalise == "std":
        centred = centred / (rewards.std(1, keepdim=True) + 1e-4)
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)      # as in grpo.group_advantages
    return centred.masked_fill(equal, 0.0)


def policy_gradient(model, prompts, rollout, advantages: Tensor, settings: grpo.LossSettings) -> Tensor:
    """The adapters' gradient (n,) of the policy loss for these advantages alone; leaves no gradient behind."""
    adapters = lora.parameters(model).values()
    model.zero_grad()
    grpo.accumulate_gradient(model, prompts, rollout, advantages.to(model.device), settings)
    vector = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in adapters])
    model.zero_grad()
    return vector
