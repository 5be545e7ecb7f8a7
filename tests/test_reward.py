"""Every equation and every method by hand-computed numbers, the gate, alpha and Eq. 1."""
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import grpo
import reward
from data import Countdown
from reward import Signals
from strategy import Features
from support.config import Config

QUERY = Config(expectation="query")  # the paper's SS, against E(query) alone
PLAIN = replace(QUERY, sus_baseline="none")


def make_signals(**changes) -> Signals:
    """Two problems, three responses; each field simple enough to work with by hand."""
    B, G = 2, 3
    fields = dict(
        correct=torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        logprobs=torch.zeros(B, G, 2),
        lengths=torch.full((B, G), 2),
        problems=[Countdown((3, 8, 5), 19)] * B,
        responses=[""] * (B * G),
        features=Features(torch.zeros(B, 4), torch.zeros(B, G, 4), torch.zeros(B, G, 2, 4)),
        z_pre=torch.tensor([[[1.0, 0.0]]] * B),
        z_post=torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]] * B),
        success=torch.tensor([[0.25], [0.5]]),
        predicted=torch.zeros(B, G, 2),
        state=torch.tensor([[[3.0, 4.0]] * G, [[0.0, 1.0]] * G]))
    return Signals(**{**fields, **changes})


def test_correctness_asks_each_problem_about_its_own_responses():
    problems = [Countdown((3, 8, 5), 19), Countdown((1, 2, 3), 6)]
    right, other = "8*3=24;24-5=19", "1+2=3;3+3=6"
    correct = reward.correctness(problems, [right, other, right, other, right, other])
    assert correct.dtype == torch.float32
    assert correct.tolist() == [[1, 0, 1], [1, 0, 1]]


def test_strategy_stability_is_the_cosine_of_eq_2():
    z_pre, z_post = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[2.0, 0.0], [4.0, 3.0]])
    expected = torch.tensor([1.0, 24 / 25])
    torch.testing.assert_close(reward.strategy_stability(z_pre, z_post), expected)


def test_strategy_surprise_is_the_prediction_error_times_instability_of_eq_3():
    predicted, state = torch.zeros(2, 2), torch.tensor([[3.0, 4.0]] * 2)
    surprise = reward.strategy_surprise(predicted, state, torch.tensor([1.0, 24 / 25]))
    torch.testing.assert_close(surprise, torch.tensor([0.0, 5 / 25]))


def test_strategy_shift_is_one_minus_the_cosine():
    z_pre, z_post = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[2.0, 0.0], [4.0, 3.0]])
    expected = torch.tensor([0.0, 1 / 25])
    torch.testing.assert_close(reward.strategy_shift(z_pre, z_post), expected)


def test_success_surprise_is_the_distance_of_the_outcome_from_its_probability():
    surprise = reward.success_surprise(torch.tensor([1.0, 0.0]), torch.tensor([0.3, 0.3]))
    torch.testing.assert_close(surprise, torch.tensor([0.7, 0.3]))


def test_the_mean_success_surprise_is_over_correct_responses_only():
    correct = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    success = torch.tensor([[0.25], [0.5]])
    mean = reward.mean_success_surprise(correct, success)
    assert mean == pytest.approx((0.75 + 0.75 + 0.5) / 3)  # over all responses it would be 0.542
    all_right = reward.mean_success_surprise(torch.ones(2, 3), success)
    assert all_right == pytest.approx((0.75 + 0.5) / 2)  # groups that are all right count too
    assert reward.mean_success_surprise(torch.zeros(2, 3), success) == 0


def test_both_readings_of_ss_and_sus():
    ss, sus = reward.parts(make_signals(), replace(QUERY, reading="algorithm"))
    torch.testing.assert_close(ss, torch.tensor([[0.0, 1.0, 2.0]] * 2))
    torch.testing.assert_close(sus, torch.tensor([[0.75, 0.75, 0.25], [0.5, 0.5, 0.5]]))
    ss, sus = reward.parts(make_signals(), replace(QUERY, reading="equations"))
    torch.testing.assert_close(ss, torch.tensor([[1.0, 0.0, -1.0]] * 2))
    torch.testing.assert_close(sus, torch.tensor([[0.0, 5.0, 10.0], [0.0, 1.0, 2.0]]))


def test_the_group_is_expected_to_go_on_as_its_other_successes_do():
    z_pre = torch.tensor([[[1.0, 0.0]]])
    z_post = torch.tensor([[[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]]])
    correct = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    expected = torch.tensor([[[2.0, 1.0], [2.0, 1.0], [1.0, 2.0], [2.0, 2.0]]])
    assert torch.equal(reward.expect_group(z_pre, z_post, correct), expected)


def test_ss_against_the_group_pays_the_rarer_way():
    z_post = torch.tensor([[[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]]])
    signals = make_signals(correct=torch.tensor([[1.0, 1.0, 1.0, 0.0]]), z_post=z_post,
                           z_pre=torch.zeros(1, 1, 2), success=torch.tensor([[0.25]]))
    ss, sus = reward.parts(signals, Config(expectation="group"))
    half = math.sqrt(0.5)
    torch.testing.assert_close(ss, torch.tensor([[1 - half, 1 - half, 1.0, 1 + 1 / math.sqrt(5)]]))
    torch.testing.assert_close(sus, torch.tensor([[0.75, 0.75, 0.75, 0.25]]))
    lone = make_signals(correct=torch.tensor([[1.0, 0.0, 0.0]] * 2))
    of_group, _ = reward.parts(lone, Config(expectation="group"))
    of_query, _ = reward.parts(lone, Config(expectation="query"))
    assert torch.equal(of_group[:, 0], of_query[:, 0])  # no other is right: E(query) alone counts


def test_the_mean_surprise_is_subtracted_from_sus_and_from_nothing_else():
    signals = make_signals(correct=torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
    ss, sus = reward.parts(signals, Config())
    paid_ss, paid_sus = reward.paid_parts(signals, Config(sus_baseline="batch"))
    assert torch.equal(paid_ss, ss)
    torch.testing.assert_close(paid_sus, sus - (0.75 + 0.75 + 0.5) / 3)
    assert torch.equal(reward.paid_parts(signals, PLAIN)[1], sus)


def test_the_equations_reading_has_no_baseline():
    config = Config(reading="equations", sus_baseline="batch")
    ss, sus = reward.parts(make_signals(), config)
    paid_ss, paid_sus = reward.paid_parts(make_signals(), config)
    assert torch.equal(paid_ss, ss)
    assert torch.equal(paid_sus, sus)


def test_what_some_successes_gain_others_pay():
    correct = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    _, sus = reward.paid_parts(make_signals(correct=correct), Config())
    torch.testing.assert_close(sus[:, 0], torch.tensor([0.75 - 2 / 3, 0.5 - 2 / 3]))
    assert sus[correct > 0].sum().abs() < 1e-6


EXPECTED = {  # without the baseline, lambda_SS 1 and lambda_SuS 0.5
    "grpo": [[0.0, 0.0, 0.0]] * 2,
    "ss": [[0.0, 1.0, 2.0]] * 2,
    "surprise": [[0.375, 0.375, 0.125], [0.25, 0.25, 0.25]],
    "sus": [[0.375, 1.375, 2.125], [0.25, 1.25, 2.25]],
    "perplexity": [[1.0] * 3] * 2,
}


@pytest.mark.parametrize("method", reward.METHODS)
def test_every_method_by_hand(method):
    bonus = reward.METHODS[method](make_signals(), PLAIN)
    torch.testing.assert_close(bonus, torch.tensor(EXPECTED[method]))


@pytest.mark.parametrize("method, expected", [
    ("sus", [[0.0, 3.0, 4.5], [-0.75, 2.25, 5.25]]),
    ("ss", [[0.0, 3.0, 6.0]] * 2),
    ("surprise", [[0.0, 0.0, -1.5], [-0.75, -0.75, -0.75]]),
    ("grpo", [[0.0] * 3] * 2),
    ("perplexity", [[1.0] * 3] * 2)])
def test_each_lambda_weighs_its_own_part_and_sus_counts_from_the_mean(method, expected):
    config = replace(QUERY, lambda_ss=3.0, lambda_sus=3.0)
    torch.testing.assert_close(reward.METHODS[method](make_signals(), config),
                               torch.tensor(expected))


def test_lambdas_are_not_swapped():
    only_ss = reward.sus(make_signals(), replace(PLAIN, lambda_ss=2.0, lambda_sus=0.0))
    torch.testing.assert_close(only_ss, torch.tensor([[0.0, 2.0, 4.0]] * 2))
    only_sus = reward.sus(make_signals(), replace(PLAIN, lambda_ss=0.0, lambda_sus=2.0))
    torch.testing.assert_close(only_sus, torch.tensor([[1.5, 1.5, 0.5], [1.0, 1.0, 1.0]]))


def test_perplexity_by_hand():
    probabilities = torch.tensor([[[0.5, 0.125], [0.25, 1.0], [1.0, 1.0]]] * 2)
    bonus = reward.perplexity(make_signals(logprobs=probabilities.log()), PLAIN)
    torch.testing.assert_close(bonus, torch.tensor([[4.0, 2.0, 1.0]] * 2))


def test_perplexity_is_per_token_of_the_response_and_bounded():
    logprobs = torch.tensor([[[-6.0, 0.0], [-6.0, -6.0], [-500.0, -500.0]]] * 2)
    lengths = torch.tensor([[1, 2, 0]] * 2)  # the last one is empty: nothing is divided by zero
    bonus = reward.perplexity(make_signals(logprobs=logprobs, lengths=lengths), PLAIN)
    expected = torch.tensor([[math.exp(6), math.exp(6), math.exp(20)]] * 2)
    torch.testing.assert_close(bonus, expected)


def test_gates_by_hand():
    correct = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert reward.gate(correct, "correct").tolist() == [[1, 0, 1], [1, 1, 1], [0, 0, 0]]
    assert reward.gate(correct, "mixed").tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert reward.gate(correct, "group").tolist() == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert reward.gate(correct, "none").tolist() == [[1, 1, 1]] * 3


def test_a_scaled_bonus_redistributes_among_those_who_earn():
    correct = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    intrinsic = torch.tensor([[1.0, 0.0, 9.0], [5.0, 0.0, 3.0], [7.0, 0.5, 2.0]])
    config = Config(alpha=2.0, alpha_decay=0.0, bonus="scaled", gate="mixed")
    rewards = reward.augment(correct, intrinsic, config, 0)
    # Weights 3, 1 and 2 of mean 2; the group that is all right earns nothing.
    torch.testing.assert_close(rewards, torch.tensor([[1.5, 0.5, 0], [1, 1, 1], [0, 1.0, 0]]))
    assert rewards[reward.gate(correct, "mixed") > 0].mean() == 1
    # A bonus for all alike is none, however large; without any, nothing changes.
    for bonus in (torch.full((3, 3), 100.0), torch.zeros(3, 3)):
        torch.testing.assert_close(reward.augment(correct, bonus, config, 0), correct)
    nobody = torch.ones(3, 3)
    assert torch.equal(reward.augment(nobody, intrinsic, config, 0), nobody)
    # With the gate `correct` it earns too: weights 3, 1, 11, 1, 7 and 2 of mean 25 / 6.
    rewards = reward.augment(correct, intrinsic, replace(config, gate="correct"), 0)
    expected = torch.tensor([[3.0, 1.0, 0.0], [11.0, 1.0, 7.0], [0.0, 2.0, 0.0]]) * 6 / 25
    torch.testing.assert_close(rewards, expected)


@pytest.mark.parametrize("bonus, words", [
    (torch.ones(6), "shape"), (torch.ones(2, 1), "shape"), ([[1.0] * 3] * 2, "shape"),
    (1.0, "shape"), (None, "shape"), (torch.full((2, 3), math.nan), "not finite"),
    (np.ones((2, 3)), "shape")])
def test_a_reward_of_another_shape_or_kind_is_refused_by_name(bonus, words):
    correct = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match=f"--method mine:reward gave .*{words}"):
        reward.augment(correct, bonus, Config(method="mine:reward"), 0)


def test_a_reward_may_be_of_another_precision_and_carry_a_gradient():
    correct = torch.tensor([[1.0, 0.0, 1.0]])
    bonus = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    config = Config(alpha=1.0, alpha_decay=0.0, bonus="added")
    rewards = reward.augment(correct, bonus, config, 0)
    assert rewards.dtype == torch.float32 and not rewards.requires_grad
    assert rewards.tolist() == [[2.0, 0.0, 4.0]]


def test_a_scaled_bonus_never_pays_a_correct_response_less_than_a_wrong_one():
    correct = torch.tensor([[1.0, 1.0, 0.0]])
    config = Config(alpha=2.0, alpha_decay=0.0, bonus="scaled")
    rewards = reward.augment(correct, torch.tensor([[-3.0, 1.0, 0.0]]), config, 0)
    torch.testing.assert_close(rewards, torch.tensor([[0.0, 2.0, 0.0]]))
    rewards = reward.augment(correct, torch.tensor([[-3.0, -1.0, 0.0]]), config, 0)
    assert torch.equal(rewards, torch.zeros(1, 3))


@pytest.mark.parametrize("gate, expected", [
    ("correct", [[1.6, 0.0], [1.3, 1.9], [0.0, 0.0]]),
    ("mixed", [[1.6, 0.0], [1.0, 1.0], [0.0, 0.0]]),
    ("none", [[1.6, 0.3], [1.3, 1.9], [1.2, 0.6]])])
def test_eq_1_behind_each_gate(gate, expected):
    correct = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    intrinsic = torch.tensor([[2.0, 1.0], [1.0, 3.0], [4.0, 2.0]])
    config = Config(alpha=0.3, alpha_decay=0.0, bonus="added", gate=gate)
    rewards = reward.augment(correct, intrinsic, config, 7)
    torch.testing.assert_close(rewards, torch.tensor(expected))


def test_what_the_gate_shuts_out_cannot_spoil_a_reward():
    correct = torch.tensor([[1.0, 0.0, 0.0]])
    intrinsic = torch.tensor([[1.0, math.inf, math.nan]])
    config = Config(alpha=2.0, alpha_decay=0.0, bonus="added", gate="mixed")
    assert reward.augment(correct, intrinsic, config, 0).tolist() == [[3.0, 0.0, 0.0]]


@pytest.mark.parametrize("normalise", ["std", "none"])
def test_groups_without_extrinsic_signal_behave_as_documented(normalise):
    """mixed: exactly zero. correct: all-right groups follow the bonus. none: all of them do."""
    correct = torch.tensor([[1.0] * 4, [0.0] * 4])
    bonus = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    moved = {}
    for gate in ("mixed", "correct", "none"):
        rewards = reward.augment(correct, bonus, Config(bonus="added", gate=gate), 0)
        moved[gate] = grpo.group_advantages(rewards, normalise).ne(0).any(1).tolist()
    assert moved == {"mixed": [False, False], "correct": [True, False], "none": [True, True]}


def test_alpha_falls_to_zero_over_a_share_of_the_run():
    config = Config(alpha=2.0, alpha_decay=0.8, steps=100)
    assert [reward.alpha_at(step, config) for step in (0, 40, 80, 99)] == [2.0, 1.0, 0.0, 0.0]
    assert reward.alpha_at(99, replace(config, alpha_decay=0.0)) == 2.0


def test_the_bonus_falls_with_alpha_and_correctness_does_not():
    config = Config(alpha=2.0, alpha_decay=0.8, steps=100, bonus="added", gate="correct")
    correct, intrinsic = torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 3.0]])
    paid = [reward.augment(correct, intrinsic, config, step).tolist() for step in (0, 40, 80, 99)]
    assert paid == [[[7.0, 0.0]], [[4.0, 0.0]], [[1.0, 0.0]], [[1.0, 0.0]]]


def test_of_two_correct_responses_the_one_with_the_unexpected_strategy_earns_more():
    correct = torch.tensor([[1.0, 1.0, 0.0]] * 2)
    config = replace(QUERY, steps=100, bonus="added", alpha=8.0)
    bonus = reward.sus(make_signals(correct=correct), config)
    expected, unexpected, wrong = reward.augment(correct, bonus, config, 50)[0].tolist()
    assert unexpected - expected == pytest.approx(config.alpha / 2 * config.lambda_ss)
    assert wrong == 0


def test_the_share_of_the_advantages_that_the_bonus_decides():
    extrinsic = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    bonus = torch.tensor([[1.0, -1.0, 1.0, -1.0]])  # uncorrelated with correctness
    assert reward.bonus_share(3 * extrinsic, extrinsic) == pytest.approx(0, abs=1e-6)
    assert reward.bonus_share(bonus, extrinsic) == pytest.approx(1)
    assert reward.bonus_share(extrinsic + bonus, extrinsic) == pytest.approx(1 / 2)
    assert reward.bonus_share(extrinsic + 2 * bonus, extrinsic) == pytest.approx(4 / 5)
    assert reward.bonus_share(7 + 3 * extrinsic, extrinsic + 5) == pytest.approx(0, abs=1e-6)
    assert reward.bonus_share(torch.zeros(1, 4), extrinsic) == 0
    assert reward.bonus_share(bonus, torch.zeros(1, 4)) == 1


def test_a_method_is_found_by_name_or_by_module():
    assert reward.find_method("sus") is reward.sus
    assert reward.find_method("ss") is reward.ss_only
    assert reward.find_method("surprise") is reward.sus_only
    assert reward.find_method("perplexity") is reward.perplexity
    assert reward.find_method("grpo") is reward.no_bonus
    assert reward.find_method("reward:perplexity") is reward.perplexity


def test_a_method_of_your_own_is_imported(tmp_path, monkeypatch):
    text = "def brief(signals, config):\n    return -config.alpha * signals.lengths.float()\n"
    (tmp_path / "my_rewards_for_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    method = reward.find_method("my_rewards_for_test:brief")
    assert method(make_signals(), Config(alpha=2.0)).tolist() == [[-4.0] * 3] * 2


@pytest.mark.parametrize("name, words", [
    ("nonsense", "expected sus, ss, surprise, perplexity, grpo, or module:function"),
    ("", "expected sus"), ("reward:", "expected sus"), ("reward:__doc__", "expected sus"),
    ("reward:nothing", "cannot be imported"), ("no_such_module:f", "cannot be imported"),
    (":f", "cannot be imported"), ("fractions:Fraction", "must be an nn.Module")])
def test_a_method_that_cannot_be_found_is_one_clear_error(name, words):
    with pytest.raises(ValueError, match=words):
        reward.find_method(name)


@pytest.mark.parametrize("bonus", [torch.ones(2), torch.full((2, 2), math.nan)])
def test_a_reward_of_another_shape_or_without_numbers_is_refused_by_name(bonus):
    correct = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    with pytest.raises(ValueError, match="--method mine:f gave"):
        reward.augment(correct, bonus, Config(method="mine:f"), 0)


@pytest.mark.parametrize("verdict", [0.5, None, float("nan"), "yes", 2, {}])
def test_a_judge_says_right_or_wrong(verdict):
    problem = SimpleNamespace(judge=lambda response: verdict)
    with pytest.raises(ValueError, match=f"a judge gave {verdict!r}, expected 1.0 or 0.0"):
        reward.correctness([problem], ["a", "b"])
    for verdict in (True, 1, 1.0):  # noqa: PLW2901
        problem = SimpleNamespace(judge=lambda response, verdict=verdict: verdict)
        assert reward.correctness([problem], ["a"]).tolist() == [[1.0]]
