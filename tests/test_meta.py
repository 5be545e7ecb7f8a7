"""Learned weights: on a constructed task the part that helps gains weight and the part that hurts loses it."""
import pytest
import torch
from conftest import small_model

import grpo
import lora
import meta
from sample import generate


def test_values_start_where_they_are_told():
    assert meta.LearnedWeights(1.0, 0.5, 0.1).values() == pytest.approx((1.0, 0.5))
    assert meta.LearnedWeights(0.0, 3.0, 0.1).values() == pytest.approx((0.001, 3.0), rel=1e-3)


def test_agreement_moves_the_weights_by_hand():
    weights = meta.LearnedWeights(1.0, 1.0, 0.5)
    raw = weights.raw.clone()
    weights.pending = torch.tensor([[2.0, 0.0], [-3.0, 0.0]])
    weights.learn(torch.tensor([5.0, 0.0]))                             # cosines 1 and -1
    torch.testing.assert_close(weights.raw, raw + 0.5 * torch.tensor([1.0, -1.0]) * raw.sigmoid())
    assert weights.pending is None


def test_parts_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    one, two = torch.rand(3, 4, generator=generator), torch.rand(3, 4, generator=generator)
    for normalise in ("std", "none"):
        whole = grpo.group_advantages(one + two, normalise)
        torch.testing.assert_close(sum(meta.part_advantages(part, one + two, normalise) for part in (one, two)), whole)


def test_a_bonus_that_helps_rises_and_one_that_hurts_falls():
    """The task wants small tokens. One bonus pays for them too, the other for large ones."""
    model = lora.apply(small_model(), 4)
    optimizer = torch.optim.AdamW(lora.parameters(model).values(), lr=1e-3)
    prompts, settings = [[3, 4], [5, 6, 7], [8]], grpo.LossSettings(max_new_tokens=6)
    weights, history = meta.LearnedWeights(1.0, 1.0, 0.3), []
    for step in range(20):
        rollout = generate(model, prompts, 200, 6, 1.0, (1,), torch.Generator().manual_seed(step))
        extrinsic = ((rollout.ids < 15) & rollout.mask()).sum(1).float().view(3, 200)
        helps, hurts = (extrinsic > 2).float(), ((rollout.ids >= 15) & rollout.mask()).sum(1).float().view(3, 200)
        l_helps, l_hurts = weights.values()
        rewards = extrinsic + 0.1 * (l_helps * helps + l_hurts * hurts)
        weights.step(model, prompts, rollout, extrinsic, [helps, hurts], rewards, "none", settings)
        assert all(p.grad is None for p in lora.parameters(model).values())
        grpo.accumulate_gradient(model, prompts, rollout, grpo.group_advantages(rewards, "none"), settings)
        optimizer.step()
        optimizer.zero_grad()
        history.append(weights.values())
    assert history[-1][0] > 1.1 and history[-1][1] < 0.9
