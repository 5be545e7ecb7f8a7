"""Learned lambdas by meta-gradient (paper, Section 3.5: the coefficients are "meta-learned").

After a gradient step theta' = theta - eta g(lambda), where g is the policy gradient for the
advantages A(lambda), the extrinsic loss on the *next* batch changes by

    d L_ext(theta') / d lambda_i  =  - eta < g_ext(next batch), g_i(this batch) >

where g_i is the policy gradient for d A / d lambda_i. So a part whose gradient agrees with what the
task asks for next gains weight (LIRPG, Zheng et al. 2018, for one step). The paper does not say how
it meta-learns. Two liberties: the adapters are updated by AdamW, so this is the gradient of a step
that is not quite taken; and the inner product is a cosine, so that the scale of the gradients does
not matter. The weights are softplus(raw).
"""
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import grpo
import lora
import reward
from support.config import Config

LEARNING_RATE = 0.1
EVERY = 10  # steps between updates of the weights
NUDGE = 1e-2  # of a weight, for d A / d lambda


class LearnedLambdas(nn.Module):
    def __init__(self, config: Config, parameters: int):
        super().__init__()
        values = torch.tensor([config.lambda_ss, config.lambda_sus])
        values = values.clamp(min=1e-3)  # softplus never reaches zero
        self.register_buffer("raw", values + (-(-values).expm1()).log())  # inverse softplus
        self.register_buffer("pending", torch.zeros(2, parameters))  # gradient of each part
        self.register_buffer("is_pending", torch.zeros(1, dtype=torch.bool))

    def apply_to(self, config: Config) -> Config:
        """The config with the learned weights in place of its own."""
        ss, sus = F.softplus(self.raw).tolist()
        return replace(config, lambda_ss=ss, lambda_sus=sus)

    def step(self, model, prompts: list, rollout, signals: reward.Signals, config: Config,
             step: int) -> None:
        """On one batch remember what each part of the bonus pulls at; on the next ask the task."""
        def gradient(advantages: Tensor) -> Tensor:
            return policy_gradient(model, prompts, rollout, advantages, config)

        if self.is_pending:
            self.learn(gradient(grpo.group_advantages(signals.correct, config.normalise)))
        elif step % EVERY == 0:
            for number, slope in enumerate(self.slopes(signals, config, step)):
                self.pending[number] = gradient(slope)
            self.is_pending.fill_(True)

    def slopes(self, signals: reward.Signals, config: Config, step: int) -> list[Tensor]:
        """d A / d lambda_i (B, G) for both parts, by central differences."""
        parts = torch.stack(reward.paid_parts(signals, config), dim=-1)  # (B, G, 2)
        weights = F.softplus(self.raw)

        def advantages(weights: Tensor) -> Tensor:
            rewards = reward.augment(signals.correct, parts @ weights, config, step)
            return grpo.group_advantages(rewards, config.normalise)

        return [(advantages(weights + nudge) - advantages(weights - nudge)) / (2 * NUDGE)
                for nudge in NUDGE * torch.eye(2, device=weights.device)]

    def learn(self, extrinsic: Tensor) -> None:
        """extrinsic (n,): the gradient of the task's own loss on the next batch."""
        agreement = F.cosine_similarity(self.pending, extrinsic[None], dim=1)  # (2,)
        if agreement.isfinite().all():  # one bad batch must not spoil the weights for good
            self.raw += LEARNING_RATE * agreement * self.raw.sigmoid()
        self.is_pending.fill_(False)


def policy_gradient(model, prompts: list, rollout, advantages: Tensor, config: Config) -> Tensor:
    """The adapters' gradient (n,) of the policy loss for these advantages; leaves none behind."""
    adapters = lora.parameters(model).values()
    model.zero_grad()
    grpo.accumulate_gradient(model, prompts, rollout, advantages, replace(config, kl=0.0))
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in adapters]
    model.zero_grad()
    return torch.cat([gradient.flatten() for gradient in gradients])
