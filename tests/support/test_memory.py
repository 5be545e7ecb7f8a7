"""What networks remember: running statistics, the newest rows, the optimizer's moments."""
from collections import Counter

import pytest
import torch
import torch.nn as nn

import strategy
from strategy import Replay, Standardise
from support.checkpoint import Learner


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_standardise_has_the_statistics_of_all_it_saw():
    norm, x = Standardise(3), 5 + 2 * torch.randn(100, 3, generator=seeded())
    for part in x.split([7, 33, 60]):
        norm.update(part)
    torch.testing.assert_close(norm.mean, x.mean(0))
    torch.testing.assert_close(norm.variance, x.var(0, unbiased=False))
    torch.testing.assert_close(norm(x).mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(norm(x).std(0, unbiased=False), torch.ones(3), atol=1e-3, rtol=1e-3)


def test_standardise_by_hand():
    norm = Standardise(1)
    norm.update(torch.tensor([[1.0], [3.0]]))
    norm.update(torch.tensor([[8.0]]))  # mean 4, deviations -3, -1, 4
    assert norm.count.item() == 3
    assert norm.mean.item() == pytest.approx(4)
    assert norm.variance.item() == pytest.approx(26 / 3)
    assert norm(torch.tensor([10.0])).item() == pytest.approx(6 / (26 / 3) ** 0.5, rel=1e-4)


def test_every_leading_dimension_is_one_of_rows():
    x = torch.randn(4, 5, 6, 3, generator=seeded())
    deep, flat = Standardise(3), Standardise(3)
    deep.update(x)
    flat.update(x.view(-1, 3))
    assert torch.equal(deep.mean, flat.mean)
    assert torch.equal(deep.variance, flat.variance)
    assert deep.count.item() == 120


def test_standardise_forgets(monkeypatch):
    monkeypatch.setattr(strategy, "STANDARDISE_ROWS", 10)
    norm = Standardise(1)
    for value in [0.0] * 50 + [1.0] * 50:
        norm.update(torch.full((1, 1), value))
    assert norm.count == 10  # so each new row weighs one in eleven
    assert norm.mean.item() == pytest.approx(1 - (10 / 11) ** 50, abs=1e-5)


def test_a_feature_that_never_varies_is_not_divided_by_zero():
    norm = Standardise(2)
    norm.update(torch.ones(5, 2))
    assert norm(torch.ones(3, 2)).tolist() == [[0.0, 0.0]] * 3


def filled_replay() -> Replay:
    """Capacity 10, of 24 rows that came in fours."""
    replay = Replay(10, query=(3,), correct=())
    for start in range(0, 24, 4):
        rows = torch.arange(start, start + 4.0)
        replay.add(query=rows[:, None].expand(4, 3), correct=-rows, unknown=rows)
    return replay


def test_replay_keeps_the_newest_rows_and_only_its_own_names():
    replay = filled_replay()
    assert sorted(replay.query[:, 0].tolist()) == list(range(14, 24))
    assert replay.added.item() == 24
    assert set(replay.sample(3, seeded())) == {"query", "correct"}


def test_replay_samples_uniformly_without_repeats_and_rows_stay_together():
    replay = filled_replay()
    draws = [replay.sample(3, seeded(seed))["query"][:, 0].tolist() for seed in range(2000)]
    counts = Counter(row for draw in draws for row in draw)
    assert len(counts) == 10
    assert all(abs(count - 600) < 100 for count in counts.values())
    everything = replay.sample(20, seeded())
    assert len(set(everything["query"][:, 0].tolist())) == 10
    assert torch.equal(everything["query"][:, 0], -everything["correct"])


def test_replay_gives_no_row_that_was_never_added():
    replay = Replay(10, query=(2,))
    replay.add(query=torch.ones(4, 2))
    assert replay.sample(10, seeded())["query"].tolist() == [[1.0, 1.0]] * 4


def test_a_batch_larger_than_the_replay_leaves_its_last_rows():
    replay = Replay(3, query=())
    replay.add(query=torch.arange(8.0))
    assert sorted(replay.query.tolist()) == [5, 6, 7]
    replay.add(query=torch.tensor([8.0]))
    assert sorted(replay.query.tolist()) == [6, 7, 8]
    assert replay.added.item() == 9


def test_memories_are_all_in_the_state_dict():
    norm, replay = Standardise(3), filled_replay()
    norm.update(torch.randn(9, 3, generator=seeded()))
    other_norm, other_replay = Standardise(3), Replay(10, query=(3,), correct=())
    other_norm.load_state_dict(norm.state_dict())
    other_replay.load_state_dict(replay.state_dict())
    x = torch.randn(5, 3, generator=seeded(1))
    for each in (norm, other_norm):
        each.update(x)
    for each in (replay, other_replay):
        each.add(query=x, correct=x[:, 0])
    assert torch.equal(norm(x), other_norm(x))
    assert torch.equal(replay.query, other_replay.query)
    sampled, other_sampled = replay.sample(6, seeded(2)), other_replay.sample(6, seeded(2))
    assert torch.equal(sampled["correct"], other_sampled["correct"])


class Line(Learner):
    """y = w x + b, and a frozen layer that does not learn."""
    rate = 0.1

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.line = nn.Linear(3, 1)
        self.frozen = nn.Linear(3, 1).requires_grad_(False)

    def fit(self, seed: int) -> None:
        x = torch.randn(8, 3, generator=seeded(seed))
        (self.line(x) + self.frozen(x)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_the_optimizer_has_what_learns_and_nothing_else():
    learner = Line()
    frozen, weight = learner.frozen.weight.clone(), learner.line.weight.clone()
    learner.fit(0)
    assert torch.equal(learner.frozen.weight, frozen)
    # The first step of AdamW moves each number by the rate (beside a weight decay of 0.01).
    expected = torch.full((1, 3), 0.1)
    moved = (learner.line.weight - weight * (1 - 0.1 * 0.01)).abs()
    torch.testing.assert_close(moved, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_learner_goes_on_from_its_state_dict_bit_for_bit(steps):
    first, second = Line(seed=0), Line(seed=1)
    for number in range(steps):
        first.fit(number)
    second.fit(99)  # what it has learned so far is replaced
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    second.load_state_dict(state)
    for number in range(steps, steps + 3):
        first.fit(number)
        second.fit(number)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_the_packed_optimizer_holds_its_step_and_both_moments():
    learner = Line()
    assert learner.get_extra_state().numel() == 0
    learner.fit(0)
    packed = learner.get_extra_state()
    assert packed.dtype == torch.float32
    assert packed.numel() == (1 + 3 + 3) + (1 + 1 + 1)  # weight, then bias
    assert packed[0] == packed[7] == 1  # one step
    x = torch.randn(8, 3, generator=seeded())
    fresh = Line()
    (fresh.line(x) + fresh.frozen(x)).square().mean().backward()
    torch.testing.assert_close(packed[1:4], 0.1 * fresh.line.weight.grad[0])
    torch.testing.assert_close(packed[4:7], 0.001 * fresh.line.weight.grad[0].square())


def test_an_optimizer_state_that_does_not_fit_is_refused():
    learner = Line()
    learner.fit(0)
    packed = learner.get_extra_state()
    with pytest.raises(ValueError, match="9 numbers, not 10"):
        learner.set_extra_state(packed[:-1])
    with pytest.raises(ValueError, match="not 10"):
        learner.set_extra_state(packed.long())
    packed[0] = -1
    with pytest.raises(ValueError, match="step count is -1"):
        learner.set_extra_state(packed)
