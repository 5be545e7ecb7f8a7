"""Every equation and every method by hand numbers."""
import math

import pytest
import torch

import grpo
import reward
from data import Countdown
from reward import Signals


def signals(**changes):
    """Two problems, three responses; each field simple enough to work with by hand."""
    B, G = 2, 3
    fields = dict(
        correct=torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), logprobs=torch.zeros(B, G, 2), lengths=torch.full((B, G), 2),
        z_pre=torch.tensor([1.0, 0.0]).expand(B, G, 2), z_post=torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]] * 2),
        success=torch.tensor([[0.25], [0.5]]), predicted=torch.zeros(B, G, 2), state=torch.tensor([[[3.0, 4.0]] * 3, [[0.0, 1.0]] * 3]),
        distillation=torch.tensor([[1.0, 2.0, 3.0]] * 2), cluster=torch.tensor([[0, 1, 0], [2, 2, 1]]),
        cluster_share=torch.full((B, G), 0.5), strategy_share=torch.tensor([[0.5, 0.1, 1.0]] * 2))
    return Signals(**{**fields, **changes})


def test_success_is_counted_from_the_batchs_average_success():
    correct, success = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([[0.25], [0.5]])
    usual = reward.usual_surprise(correct, success)
    assert usual == pytest.approx((0.75 + 0.75 + 0.5) / 3)
    ss, sus = reward.paid(signals(correct=correct, usual=usual))
    assert torch.equal(ss, reward.parts(signals())[0])
    torch.testing.assert_close(sus[:, 0], torch.tensor([0.75 - 2 / 3, 0.5 - 2 / 3]))
    assert sus[correct > 0].sum().abs() < 1e-6              # what some successes gain the others pay
    assert reward.usual_surprise(torch.zeros(2, 3), success) == 0


def test_correctness_asks_each_problem_about_its_own_responses():
    problems = [Countdown((3, 8, 5), 19), Countdown((1, 2, 3), 6)]
    right, other = "8*3=24;24-5=19", "1+2=3;3+3=6"
    c = reward.correctness(problems, [right, other, right, other, right, other])
    assert c.dtype == torch.float32
    assert c.tolist() == [[1, 0, 1], [1, 0, 1]]


def test_the_equations():
    z_pre, z_post = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[2.0, 0.0], [4.0, 3.0]])
    ss = reward.stability(z_pre, z_post)
    torch.testing.assert_close(ss, torch.tensor([1.0, 24 / 25]))                                 # Eq. 2
    torch.testing.assert_close(reward.surprise(torch.zeros(2, 2), torch.tensor([[3.0, 4.0]] * 2), ss),
                               torch.tensor([0.0, 5 / 25]))                                      # Eq. 3
    torch.testing.assert_close(reward.combine(ss, torch.tensor([1.0, 2.0]), 0.5, 2.0), torch.tensor([2.5, 4.48]))    # Eq. 4
    torch.testing.assert_close(reward.shift(z_pre, z_post), 1 - ss)                              # Algorithm 1
    torch.testing.assert_close(reward.success_surprise(torch.tensor([1.0, 0.0]), torch.tensor([0.3, 0.3])), torch.tensor([0.7, 0.3]))
    torch.testing.assert_close(reward.augment(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 2.0]), 0.3, torch.tensor([1.0, 0.0])),
                               torch.tensor([1.6, 0.0]))                                         # Eq. 1


def test_gates():
    correct = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert reward.gate(correct, "correct").tolist() == [[1, 0, 1], [1, 1, 1], [0, 0, 0]]
    assert reward.gate(correct, "mixed").tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert reward.gate(correct, "none").tolist() == [[1, 1, 1]] * 3


@pytest.mark.parametrize("normalise", ["std", "none"])
def test_groups_without_extrinsic_signal_behave_as_documented(normalise):
    """mixed: exactly zero. correct: all-right groups follow the bonus, all-wrong ones stay at zero. none: both follow it."""
    correct, bonus = torch.tensor([[1.0] * 4, [0.0] * 4]), torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    moved = {name: grpo.group_advantages(reward.augment(correct, bonus, 0.3, reward.gate(correct, name)), normalise).ne(0).any(1).tolist()
             for name in ("mixed", "correct", "none")}
    assert moved == {"mixed": [False, False], "correct": [True, False], "none": [True, True]}


def test_alpha_falls_to_zero_over_a_share_of_the_run():
    assert [reward.alpha_at(step, 100, 2.0, 0.8) for step in (0, 40, 80, 99)] == [2.0, 1.0, 0.0, 0.0]
    assert reward.alpha_at(99, 100, 2.0, 0.0) == 2.0


def test_both_readings():
    ss, sus = reward.parts(signals())
    torch.testing.assert_close(ss, torch.tensor([[0.0, 1.0, 2.0]] * 2))
    torch.testing.assert_close(sus, torch.tensor([[0.75, 0.75, 0.25], [0.5, 0.5, 0.5]]))
    ss, sus = reward.parts(signals(reading="equations"))
    torch.testing.assert_close(ss, torch.tensor([[1.0, 0.0, -1.0]] * 2))
    torch.testing.assert_close(sus, torch.tensor([[0.0, 5.0, 10.0], [0.0, 1.0, 2.0]]))


EXPECTED = {
    "grpo": [[0.0, 0.0, 0.0]] * 2,
    "ss": [[0.0, 1.0, 2.0]] * 2,
    "surprise": [[0.375, 0.375, 0.125], [0.25, 0.25, 0.25]],
    "sus": [[0.375, 1.375, 2.125], [0.25, 1.25, 2.25]],
    "rnd": [[1.0, 2.0, 3.0]] * 2,
    "icm": [[5.0] * 3, [1.0] * 3],
    "count": [[math.sqrt(2)] * 3] * 2,                                  # half of the responses
    "novelty": [[1.0, 1.0, 1.5], [0.0] * 3],                            # the second group has no correct response
    "uniqueness": [[1.0, 1.0, 1.0], [1.0] * 3],
    "oracle": [[math.log(2), math.log(10), 0.0]] * 2,
    "perplexity": [[1.0] * 3] * 2,
}


@pytest.mark.parametrize("method", reward.METHODS)
def test_methods_by_hand(method):
    torch.testing.assert_close(reward.METHODS[method](signals()), torch.tensor(EXPECTED[method]))


def test_perplexity_and_uniqueness_by_hand():
    logprobs = torch.log(torch.tensor([[[0.5, 0.125], [0.25, 1.0], [1.0, 1.0]]] * 2))
    torch.testing.assert_close(reward.perplexity(signals(logprobs=logprobs)), torch.tensor([[4.0, 2.0, 1.0]] * 2))
    crowd = signals(correct=torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]]))
    torch.testing.assert_close(reward.uniqueness(crowd), torch.tensor([[0.5, 1.0, 0.5], [1.0, 1.0, 1.0]]))
