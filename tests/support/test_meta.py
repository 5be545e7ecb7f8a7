"""Learned lambdas: the part of the bonus that helps the task gains weight, the other loses it."""
import math
from dataclasses import replace

import pytest
import torch

import grpo
import lora
import reward
from reward import Signals
from sample import generate, seeded
from strategy import Features
from support import meta
from support.config import Config
from support.meta import LearnedLambdas
from tests.conftest import small_model

PROMPTS = [[3, 4], [5, 6, 7], [8]]
TOKENS = 2
CONFIG = Config(bonus="added", gate="none", alpha=1.0, alpha_decay=0.0, expectation="query",
                sus_baseline="none", lambda_ss=1.0, lambda_sus=1.0, kl=0.5, max_new_tokens=TOKENS)


def make_signals(correct, shift, success) -> Signals:
    """correct (B, G); SS is 1 where shift (B, G) is 1, else 0; P(query) = success everywhere."""
    B, G = correct.shape
    z_post = torch.stack((1 - shift, shift), dim=-1)
    return Signals(
        correct=correct, logprobs=torch.zeros(B, G, 1), lengths=torch.ones(B, G), problems=[],
        responses=[], features=Features(torch.zeros(B, 1), torch.zeros(B, G, 1),
                                        torch.zeros(B, G, 2, 1)),
        z_pre=torch.tensor([1.0, 0.0]).expand(B, 1, 2), z_post=z_post,
        success=torch.full((B, 1), success))


def roll_out(model, step: int, samples: int = 100):
    """Responses, and which of them begin with a small token: that is the task."""
    rollout = generate(model, PROMPTS, samples, TOKENS, 1.0, (1,), seeded("rollout", step))
    return rollout, (rollout.ids[:, 0] < 15).float().view(len(PROMPTS), samples)


def make_lambdas(model, config=CONFIG) -> LearnedLambdas:
    return LearnedLambdas(config, sum(each.numel() for each in lora.parameters(model).values()))


def values(lambdas: LearnedLambdas) -> tuple[float, float]:
    config = lambdas.apply_to(CONFIG)
    return config.lambda_ss, config.lambda_sus


@pytest.fixture
def model():
    return lora.apply(small_model(), 4)


def test_values_start_where_they_are_told():
    config = Config(lambda_ss=1.0, lambda_sus=0.5, alpha=3.0)
    learned = LearnedLambdas(config, 4).apply_to(config)
    assert (learned.lambda_ss, learned.lambda_sus) == pytest.approx((1.0, 0.5))
    assert learned.alpha == 3.0  # nothing else changes
    config = Config(lambda_ss=0.0, lambda_sus=3.0)
    learned = LearnedLambdas(config, 4).apply_to(config)
    assert (learned.lambda_ss, learned.lambda_sus) == pytest.approx((0.001, 3.0), rel=1e-3)


def test_agreement_moves_the_weights_by_hand():
    lambdas = LearnedLambdas(Config(lambda_ss=1.0, lambda_sus=2.0), 2)
    raw = lambdas.raw.clone()
    lambdas.pending.copy_(torch.tensor([[2.0, 0.0], [-3.0, 4.0]]))
    lambdas.is_pending.fill_(True)
    lambdas.learn(torch.tensor([5.0, 0.0]))  # cosines 1 and -0.6
    expected = raw + 0.1 * torch.tensor([1.0, -0.6]) * raw.sigmoid()
    torch.testing.assert_close(lambdas.raw, expected)
    assert not lambdas.is_pending
    learned = lambdas.apply_to(Config())
    assert learned.lambda_ss > 1
    assert learned.lambda_sus < 2


def test_weights_stay_positive_however_long_a_part_hurts():
    lambdas = LearnedLambdas(Config(lambda_ss=1.0, lambda_sus=1.0), 1)
    for _ in range(500):
        lambdas.pending.copy_(torch.tensor([[1.0], [-1.0]]))
        lambdas.learn(torch.tensor([1.0]))
    learned = lambdas.apply_to(Config())
    assert learned.lambda_ss > 5
    assert 0 < learned.lambda_sus < 0.2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(bad):
    lambdas = LearnedLambdas(Config(), 2)
    raw = lambdas.raw.clone()
    lambdas.pending.copy_(torch.ones(2, 2))
    lambdas.is_pending.fill_(True)
    lambdas.learn(torch.tensor([1.0, bad]))
    assert torch.equal(lambdas.raw, raw)
    assert not lambdas.is_pending


@pytest.mark.parametrize("settings", [
    {}, {"normalise": "std"}, {"gate": "correct"}, {"bonus": "scaled", "gate": "correct"},
    {"bonus": "scaled", "gate": "mixed", "normalise": "std", "alpha": 4.0},
    {"bonus": "scaled", "gate": "correct", "alpha": 4.0, "alpha_decay": 1.0, "steps": 40,
     "lambda_ss": 0.3, "lambda_sus": 1.7}], ids=str)
def test_slopes_are_the_derivatives_of_the_advantages(settings):
    """Against autograd, through the rewards written out once more."""
    config = replace(CONFIG, **settings)
    correct = (torch.rand(3, 4, generator=seeded(1)) < 0.6).float()
    shift = torch.rand(3, 4, generator=seeded(2)).round()
    signals = make_signals(correct, shift, success=0.25)
    ss, sus = shift, (correct - 0.25).abs()
    earns = reward.gate(correct, config.gate)
    alpha = config.alpha * 0.75 if config.alpha_decay else config.alpha  # step 10 of 40

    def advantages(weights):
        bonus = alpha * earns * (weights[0] * ss + weights[1] * sus)
        rewards = correct + bonus
        if config.bonus == "scaled":
            mean = ((1 + bonus) * earns).sum() / earns.sum()
            rewards = correct * torch.where(earns > 0, (1 + bonus) / mean, 1.0)
        centred = rewards - rewards.mean(1, keepdim=True)
        if config.normalise == "std":
            centred = centred / (rewards.std(1, keepdim=True) + 1e-4)
        return centred * (rewards.amax(1, keepdim=True) > rewards.amin(1, keepdim=True))

    weights = torch.tensor([config.lambda_ss, config.lambda_sus])
    expected = torch.autograd.functional.jacobian(advantages, weights).unbind(-1)
    slopes = LearnedLambdas(config, 1).slopes(signals, config, 10)
    assert sum(slope.abs().sum() for slope in slopes) > 0
    for slope, wanted in zip(slopes, expected):
        torch.testing.assert_close(slope, wanted, atol=2e-3, rtol=2e-3)


def test_a_part_that_is_the_same_for_all_pulls_at_nothing_when_rewards_are_scaled():
    config = replace(CONFIG, bonus="scaled", gate="correct", alpha=4.0)
    correct = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    signals = make_signals(correct, shift=torch.ones(2, 3), success=0.0)
    for slope in LearnedLambdas(config, 1).slopes(signals, config, 0):
        assert slope.abs().max() < 1e-4


def test_the_policy_gradient_is_that_of_the_loss_without_kl_and_leaves_none_behind(model):
    rollout, correct = roll_out(model, 0)
    advantages = grpo.group_advantages(correct, "none")
    gradient = meta.policy_gradient(model, PROMPTS, rollout, advantages, CONFIG)
    adapters = list(lora.parameters(model).values())
    assert all(adapter.grad is None for adapter in adapters)
    grpo.accumulate_gradient(model, PROMPTS, rollout, advantages, replace(CONFIG, kl=0.0))
    expected = torch.cat([adapter.grad.flatten() for adapter in adapters])
    assert torch.equal(gradient, expected)
    assert gradient.abs().sum() > 0
    zero = meta.policy_gradient(model, PROMPTS, rollout, torch.zeros_like(advantages), CONFIG)
    assert zero.tolist() == [0.0] * len(expected)


def test_a_part_that_helps_rises_and_one_that_hurts_falls(model):
    """SS pays for what the task wants. P says 1, so SuS = |c - 1| pays for failures."""
    optimizer = torch.optim.AdamW(lora.parameters(model).values(), lr=1e-3)
    lambdas = make_lambdas(model)
    for step in range(20):
        rollout, correct = roll_out(model, step)
        signals = make_signals(correct, shift=correct, success=1.0)
        config = replace(lambdas.apply_to(CONFIG), alpha=0.1, alpha_decay=0.0)
        rewards = reward.augment(correct, reward.sus(signals, config), config, step)
        lambdas.step(model, PROMPTS, rollout, signals, CONFIG, meta.EVERY * step)
        assert all(adapter.grad is None for adapter in lora.parameters(model).values())
        advantages = grpo.group_advantages(rewards, "none")
        grpo.accumulate_gradient(model, PROMPTS, rollout, advantages, replace(CONFIG, kl=0.0))
        optimizer.step()
        optimizer.zero_grad()
    ss, sus = values(lambdas)
    assert ss > 1.2
    assert sus < 0.8


def test_the_next_batch_is_asked_about_correctness_and_not_about_the_reward(model):
    """The bonus is so large that the whole reward prefers failures; the task must still decide."""
    rollout, correct = roll_out(model, 0)
    signals = make_signals(correct, shift=correct, success=1.0)
    config = replace(CONFIG, alpha=50.0)
    lambdas = make_lambdas(model)
    raw = lambdas.raw.clone()
    for step in range(2):
        lambdas.step(model, PROMPTS, rollout, signals, config, step)
    agreement = torch.tensor([1.0, -1.0])  # one part is correctness itself, the other its opposite
    torch.testing.assert_close(lambdas.raw, raw + 0.1 * agreement * raw.sigmoid())


def pending_after(model, shift_of_failures: float, gate: str) -> torch.Tensor:
    """What each part pulls at, if failures have this SS and correct responses differ in theirs."""
    rollout, correct = roll_out(model, 0)
    shift = torch.rand(correct.shape, generator=seeded("shift")).round()
    shift = torch.where(correct > 0, shift, shift_of_failures)
    signals = make_signals(correct, shift, success=0.25)
    config = replace(CONFIG, gate=gate)
    lambdas = make_lambdas(model)
    lambdas.step(model, PROMPTS, rollout, signals, config, 0)
    assert lambdas.is_pending
    return lambdas.pending


def test_parts_count_only_where_the_gate_is_open(model):
    shut = pending_after(model, 0.0, "correct"), pending_after(model, 1.0, "correct")
    torch.testing.assert_close(*shut)
    assert shut[0][0].abs().sum() > 0
    open_gate = pending_after(model, 0.0, "none"), pending_after(model, 1.0, "none")
    assert torch.cosine_similarity(open_gate[0][0], open_gate[1][0], dim=0) < 0.9


def test_pending_gradients_are_those_of_the_paid_parts_in_their_order(model):
    rollout, correct = roll_out(model, 0)
    shift = torch.rand(correct.shape, generator=seeded("shift")).round()
    chance = torch.tensor([[0.25], [0.5], [0.75]])  # P(query) of the three problems
    signals = replace(make_signals(correct, shift, success=0.0), success=chance)
    config = replace(CONFIG, gate="mixed", sus_baseline="batch")
    lambdas = make_lambdas(model)
    lambdas.step(model, PROMPTS, rollout, signals, config, 0)
    paid_ss = shift * correct
    surprise = (1 - chance) * correct
    paid_sus = (surprise - surprise.sum() / correct.sum()) * correct
    for pending, paid in zip(lambdas.pending, (paid_ss, paid_sus)):
        advantages = paid - paid.mean(1, keepdim=True)
        expected = meta.policy_gradient(model, PROMPTS, rollout, advantages, config)
        torch.testing.assert_close(pending, expected)


def test_gradients_are_taken_every_ten_steps_and_used_on_the_next_batch(model):
    rollout, correct = roll_out(model, 0)
    signals = make_signals(correct, shift=correct, success=1.0)
    lambdas, history = make_lambdas(model), []
    for step in range(12):
        before = lambdas.raw.clone()
        lambdas.step(model, PROMPTS, rollout, signals, CONFIG, step)
        history.append((bool(lambdas.is_pending), not torch.equal(lambdas.raw, before)))
    asked, learned, idle = (True, False), (False, True), (False, False)
    assert history == [asked, learned, *[idle] * 8, asked, learned]


def test_what_is_pending_survives_a_checkpoint(model):
    rollout, correct = roll_out(model, 0)
    signals = make_signals(correct, shift=correct, success=1.0)
    lambdas, other = make_lambdas(model), make_lambdas(model, Config(lambda_ss=4.0))
    lambdas.step(model, PROMPTS, rollout, signals, CONFIG, 0)
    other.load_state_dict({name: each.clone() for name, each in lambdas.state_dict().items()})
    rollout, correct = roll_out(model, 1)
    for each in (lambdas, other):
        signals = make_signals(correct, shift=correct, success=1.0)
        each.step(model, PROMPTS, rollout, signals, CONFIG, 1)
    assert torch.equal(lambdas.raw, other.raw)
    assert values(lambdas) != (1.0, 1.0)
