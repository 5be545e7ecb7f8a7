"""The method does what it is for: SuS keeps correct strategies that plain GRPO loses.

A toy: a problem can be played in six ways, three of them correct, one of which the policy prefers
from the start. The policy is a table of logits; what it plays is shown to the real strategy
networks as features, and the real rewards, gate and advantages teach it.
"""
import pytest
import torch
import torch.nn.functional as F

import grpo
import reward
from sample import Rollout
from strategy import Features, Strategist
from support.config import Config

PROBLEMS, WAYS, RIGHT, G, SIZE, STEPS = 12, 6, 3, 8, 24, 80
NOISE = 0.5  # of a view of a response


def shuffle_bonus(rewards: torch.Tensor, correct: torch.Tensor, generator) -> torch.Tensor:
    """The same bonuses, dealt out at random among the responses that were paid one."""
    paid = (rewards != correct).nonzero(as_tuple=True)
    order = torch.randperm(len(paid[0]), generator=generator)
    shuffled = rewards.clone()
    shuffled[paid] = rewards[paid][order]
    return shuffled


def train_toy(method: str, seed: int, **flags) -> float:
    """-> how many of the three correct ways the policy still uses, in the mean over problems."""
    generator = torch.Generator().manual_seed(seed)
    config = Config(samples=G, steps=STEPS, seed=seed, alpha_decay=0.0, **flags)
    strategist = Strategist(SIZE, config)
    ways = torch.randn(WAYS, SIZE, generator=generator)
    queries = torch.randn(PROBLEMS, SIZE, generator=generator)
    order = torch.rand(PROBLEMS, WAYS, generator=generator).argsort(1)
    right = torch.zeros(PROBLEMS, WAYS).scatter(1, order[:, :RIGHT], 1.0)
    logits = torch.zeros(PROBLEMS, WAYS).scatter(1, order[:, :1], 1.5).requires_grad_()
    optimizer = torch.optim.AdamW([logits], lr=0.1, weight_decay=0.0)
    for step in range(STEPS):
        chosen = torch.multinomial(logits.softmax(1), G, replacement=True, generator=generator)
        correct = right.gather(1, chosen)  # (B, G)
        response = ways[chosen]  # (B, G, D)
        noise = NOISE * torch.randn(PROBLEMS, G, 2, SIZE, generator=generator)
        features = Features(queries, response, response[:, :, None] + noise)
        rewards = correct
        if method != "grpo":
            strategist.observe(features, correct)
            empty = torch.zeros(PROBLEMS * G, 1)
            rollout = Rollout(empty.long(), empty[:, 0].long() + 1, empty, empty[:, 0] == 0)
            signals = strategist.signals(features, correct, rollout, [], [])
            rewards = reward.augment(correct, reward.METHODS["sus"](signals, config), config, step)
            strategist.learn(4, generator)
        if method == "shuffled":
            rewards = shuffle_bonus(rewards, correct, generator)
        advantages = grpo.group_advantages(rewards, config.normalise)
        logprobs = F.log_softmax(logits, dim=1).gather(1, chosen)
        optimizer.zero_grad()
        (-(advantages * logprobs).mean()).backward()
        optimizer.step()
    return float((right * (logits.softmax(1) > 0.1)).sum(1).mean())


@pytest.mark.parametrize("seed", [0, 1])
def test_sus_keeps_strategies_that_grpo_and_random_bonuses_lose(seed):
    kept = {method: train_toy(method, seed) for method in ("sus", "grpo", "shuffled")}
    print(kept)
    assert kept["sus"] > kept["grpo"] + 0.5
    assert kept["sus"] > kept["shuffled"] + 0.5


@pytest.mark.parametrize("seed", [0, 1])
def test_ways_that_are_rare_in_their_group_are_kept_also_where_all_are_right(seed):
    flags = {"expectation": "group", "gate": "correct", "alpha": 2.0}
    kept = {method: train_toy(method, seed, **flags) for method in ("sus", "grpo", "shuffled")}
    assert kept["sus"] > kept["grpo"] + 0.5
    assert kept["sus"] > kept["shuffled"] + 0.5
