"""Rewards by hand."""
import torch

import reward
from data import Countdown


def test_correctness_asks_each_problem_about_its_own_responses():
    problems = [Countdown((3, 8, 5), 19), Countdown((1, 2, 3), 6)]
    right, other = "8*3=24;24-5=19", "1+2=3;3+3=6"
    c = reward.correctness(problems, [right, other, right, other, right, other])
    assert c.dtype == torch.float32
    assert c.tolist() == [[1, 0, 1], [1, 0, 1]]
