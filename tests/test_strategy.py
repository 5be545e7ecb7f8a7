"""The encoder, every part of the strategy loss by hand, and what the networks know after learning.

The last part is about behaviour: E(query) comes to lie near what its responses do, P learns how
often a query is solved, and clusters of embeddings recover the true strategies.
"""
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers

import data
import lora
import reward
import strategy
from reward import Signals
from sample import Rollout, generate, seeded
from strategy import BaseEncoder, Features, Strategist, info_nce
from support.clustering import k_means, nearest
from support.config import Config
from support.fast import accelerate
from tests.conftest import adapted, mutual_information, small_model

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11]]


@pytest.fixture
def model():
    return adapted()


def encode(model, rollout: Rollout, micro_batch: int = 8, seed: int = 0) -> Features:
    encoder = BaseEncoder(model, micro_batch)
    texts = [""] * len(rollout.ids)
    return encoder.encode([None] * len(PROMPTS), PROMPTS, rollout, texts, seeded(seed))


# Features


def test_pooling_by_hand():
    states = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [100.0, 100.0]],
                           [[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    expected = torch.tensor([[2.0, 3.0], [0.0, 0.0]])
    torch.testing.assert_close(strategy.pool(states, mask), expected)


def test_halves_split_a_response_and_no_token_is_in_both():
    ids = torch.tensor([[5, 7, 5, 8, 7, 5, 6, 4, 3], [2, 3, 4, 5, 9, 9, 9, 9, 9]])
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    splits = set()
    for seed in range(40):
        first, second = strategy.random_halves(ids, mask, seeded(seed)).unbind(1)
        assert torch.equal(first | second, mask)
        for row in range(2):
            if torch.equal(first[row], mask[row]) and torch.equal(second[row], mask[row]):
                continue  # one half would have been empty
            kinds = [set(ids[row][half[row]].tolist()) for half in (first, second)]
            assert kinds[0]
            assert kinds[1]
            assert kinds[0].isdisjoint(kinds[1])
        splits.add(tuple(first[0].tolist()))
    assert len(splits) > 15
    sizes = [sum(split) for split in splits]
    assert 3 < sum(sizes) / len(sizes) < 6  # about half of nine


def test_rows_are_split_independently_of_each_other():
    ids = torch.arange(12).repeat(50, 1)
    first = strategy.random_halves(ids, torch.ones_like(ids).bool(), seeded(0))[:, 0]
    assert len({tuple(row) for row in first.tolist()}) > 40


def test_a_half_that_would_be_empty_is_the_whole_response():
    ids = torch.tensor([[2, 0, 0], [0, 0, 0], [4, 4, 4]])
    mask = torch.arange(3) < torch.tensor([[1], [0], [3]])  # one token, none, three alike
    for seed in range(5):
        for half in strategy.random_halves(ids, mask, seeded(seed)).unbind(1):
            assert torch.equal(half, mask)


@pytest.mark.parametrize("make_model", [adapted, lambda: accelerate(adapted())],
                         ids=["textbook", "fast"])
def test_features_equal_a_loop_over_transformers_hidden_states(make_model, tmp_path):
    """The base's states after the first attention: one sequence at a time, no padding, no LoRA."""
    model = make_model()
    rollout = generate(model, PROMPTS, 3, 9, 1.0, (1, 2), seeded(0))
    ours = encode(model, rollout, micro_batch=2)
    small_model().save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    captured = []
    theirs.model.layers[0].post_attention_layernorm.register_forward_pre_hook(
        lambda module, inputs: captured.append(inputs[0]))
    for n in range(9):
        b, g = divmod(n, 3)
        prompt, response = PROMPTS[b], rollout.ids[n, :rollout.lengths[n]].tolist()
        with torch.no_grad():
            theirs(torch.tensor([prompt + response]))
        states = captured.pop()[0]
        query, answer = states[:len(prompt)], states[len(prompt):-1]
        torch.testing.assert_close(ours.query[b], query.mean(0), atol=1e-4, rtol=1e-4)
        if len(answer):
            torch.testing.assert_close(ours.response[b, g], answer.mean(0), atol=1e-4, rtol=1e-4)
    assert ours.both is None


def test_views_are_the_means_of_the_two_halves(model):
    rollout = generate(model, PROMPTS, 3, 9, 1.0, (1, 2), seeded(0))
    features = encode(model, rollout, seed=5)
    ids, mask = rollout.ids[:, :-1], rollout.mask()[:, 1:]
    halves = strategy.random_halves(ids, mask, seeded(5))
    counts = halves.sum(-1).view(3, 3, 2, 1)
    disjoint = ~(halves[:, 0] & halves[:, 1]).any(1).view(3, 3)
    assert disjoint.sum() > 3
    weighted = (features.views * counts).sum(2) / counts.sum(2).clamp(min=1)
    torch.testing.assert_close(weighted[disjoint], features.response[disjoint], atol=1e-5,
                               rtol=1e-5)
    assert (features.views[:, :, 0] - features.views[:, :, 1])[disjoint].abs().max() > 0.01
    torch.testing.assert_close(features.views[~disjoint][:, 0], features.response[~disjoint])


def test_micro_batches_change_no_view(model):
    rollout = generate(model, PROMPTS, 3, 9, 1.0, (1, 2), seeded(0))
    whole, cut = encode(model, rollout, 3, seed=5), encode(model, rollout, 1, seed=5)
    for name in ("query", "response", "views"):
        torch.testing.assert_close(getattr(whole, name), getattr(cut, name), atol=1e-5, rtol=1e-5)


def test_the_encoder_leaves_the_adapters_on(model):
    rollout = generate(model, PROMPTS, 3, 9, 1.0, (1, 2), seeded(0))
    before = model(torch.tensor([[3, 4, 5]]))
    features = encode(model, rollout)
    assert torch.equal(model(torch.tensor([[3, 4, 5]])), before)
    assert not any(value.requires_grad for value in vars(features).values() if value is not None)


def test_one_token_responses_have_no_states_and_no_nan(model):
    rollout = generate(model, PROMPTS, 3, 1, 1.0, (1,), seeded(0))
    features = encode(model, rollout)
    assert (features.response == 0).all()
    assert (features.views == 0).all()


# The loss


def random_features(B=6, G=4, D=10, seed=0) -> Features:
    generator = seeded("features", seed)
    shapes = ((B,), (B, G), (B, G, 2), (B, G))
    return Features(*(torch.randn(*shape, D, generator=generator) for shape in shapes))


def make_strategist(size=10, seed=0, kind=Strategist, **changes) -> Strategist:
    """A strategist whose momentum head differs from E, as it does after some learning."""
    strategist = kind(size, Config(samples=4, seed=seed, **changes))
    for number, parameter in enumerate(strategist.PSE.parameters()):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=seeded("PSE", number))
    return strategist


def make_signals(strategist: Strategist, features: Features, correct=None) -> Signals:
    B, G = features.response.shape[:2]
    correct = torch.zeros(B, G) if correct is None else correct
    rollout = Rollout(torch.zeros(B * G, 2).long(), torch.full((B * G,), 2),
                      torch.full((B * G, 2), -0.5), torch.ones(B * G).bool())
    return strategist.signals(features, correct, rollout, [None] * B, [""] * (B * G))


def test_the_head_has_three_layers_and_ends_on_the_unit_sphere():
    strategist, query = make_strategist(), torch.randn(3, 10, generator=seeded(1))
    first, _, _, second, _, _, third = strategist.E
    x = (query - strategist.query_norm.mean) / (strategist.query_norm.variance.sqrt() + 1e-5)
    for layer in (first, second):
        x = F.relu(F.layer_norm(x @ layer.weight.T + layer.bias, (128,)))
    x = x @ third.weight.T + third.bias
    expected = x / x.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(strategist.expected(query), expected)
    assert expected.shape == (3, 128)
    torch.testing.assert_close(strategist.achieved(query).norm(dim=-1), torch.ones(3))


def no_copies(B: int, G: int) -> torch.Tensor:
    return torch.eye(G).bool().expand(B, G, G)


def test_info_nce_by_hand():
    anchors = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])
    loss, accuracy = info_nce(anchors, anchors, no_copies(2, 2), "group")
    distinct = math.log(1 + math.exp(-2))  # -log e^2 / (e^2 + e^0)
    alike = math.log(2)
    assert loss.item() == pytest.approx((distinct + alike) / 2)
    assert accuracy.item() == 0.75
    loss, _ = info_nce(anchors, anchors, no_copies(2, 2), "batch")  # three of the four look alike
    expected = (3 * math.log(3 + math.exp(-2)) + math.log(1 + 3 * math.exp(-2))) / 4
    assert loss.item() == pytest.approx(expected)


def test_the_positive_is_ones_own_target():
    anchors, targets = torch.eye(2)[None], torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    loss, accuracy = info_nce(anchors, targets, no_copies(1, 2), "group")
    assert loss.item() == pytest.approx(math.log(1 + math.exp(2)))
    assert accuracy == 0


def test_responses_that_say_the_same_are_no_negatives():
    anchors = torch.eye(4)[:3][None].clone()  # three responses, the first two alike
    anchors[0, 1] = anchors[0, 0]
    same = torch.tensor([[[True, True, False], [True, True, False], [False, False, True]]])
    loss, accuracy = info_nce(anchors, anchors, same, "group")
    expected = 2 / 3 * math.log(1 + math.exp(-2)) + 1 / 3 * math.log(1 + 2 * math.exp(-2))
    assert loss.item() == pytest.approx(expected)
    assert accuracy == 1
    twice = anchors.repeat(2, 1, 1)
    loss, _ = info_nce(twice, twice, same.repeat(2, 1, 1), "batch")
    # The other group's copies stay negatives: e^2 + 2 e^2 + 2 for the first two responses of a
    # group, e^2 + e^2 + 4 for the third.
    e = math.exp(2)
    expected = 2 / 3 * math.log((3 * e + 2) / e) + 1 / 3 * math.log((2 * e + 4) / e)
    assert loss.item() == pytest.approx(expected)


def slow_info_nce(anchors, targets, negatives: str) -> float:
    """The mean of - log softmax(anchor . target / 0.5) at each row's own target, in loops."""
    B, G, _ = anchors.shape
    total = 0.0
    for b in range(B):
        for g in range(G):
            groups = range(B) if negatives == "batch" else [b]
            rivals = [math.exp(anchors[b, g] @ targets[c, h] / 0.5)
                      for c in groups for h in range(G)]
            own = math.exp(anchors[b, g] @ targets[b, g] / 0.5)
            total -= math.log(own / sum(rivals))
    return total / (B * G)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


@torch.no_grad()
@pytest.mark.parametrize("negatives", ["group", "batch"])
def test_the_loss_by_hand(negatives):
    """Contrast of E against PSE both ways round, the whole response's distance to its halves, the
    expectation, and P's cross-entropy."""
    strategist, groups = make_strategist(negatives=negatives), random_features()
    E, PSE = strategist.E, strategist.PSE
    strategist.remember(random_features(B=50, seed=1), torch.zeros(50, 4))
    queries = torch.randn(9, 10, generator=seeded("queries"))
    correct = torch.rand(9, 4, generator=seeded("correct")).round()
    total, parts = strategist.loss(groups, queries, correct)
    norm = strategist.response_norm
    first, second = (norm(view) for view in groups.views.unbind(2))
    contrast = slow_info_nce(unit(E(first)), unit(PSE(second)), negatives)
    mirrored = slow_info_nce(unit(E(second)), unit(PSE(first)), negatives)
    expected = unit(E(strategist.query_norm(groups.query)))
    achieved = unit(PSE(norm(groups.response)))
    cosines = [expected[b] @ achieved[b, g] for b in range(6) for g in range(4)]
    expectation = 1 - sum(cosines).item() / 24
    whole = unit(E(norm(groups.response)))
    near = [whole[b, g] @ unit(PSE(half))[b, g]
            for half in (first, second) for b in range(6) for g in range(4)]
    alignment = 1 - sum(near).item() / 48
    chance = strategist.P(strategist.query_norm(queries)).sigmoid()  # (9, 1)
    likelihood = torch.where(correct > 0, chance, 1 - chance)
    success = -likelihood.log().mean().item()
    assert parts["contrastive_loss"] == pytest.approx(contrast, rel=1e-4)
    assert parts["alignment_loss"] == pytest.approx(alignment, rel=1e-4)
    assert parts["expectation_loss"] == pytest.approx(expectation, rel=1e-4)
    assert parts["success_loss"] == pytest.approx(success, rel=1e-4)
    together = (contrast + mirrored) / 2 + alignment + expectation + success
    assert total.item() == pytest.approx(together, rel=1e-4)
    assert abs(contrast - mirrored) > 1e-3


def test_the_loss_does_not_depend_on_which_view_comes_first():
    strategist, groups = make_strategist(), random_features()
    outcomes = torch.zeros(9, 10), torch.zeros(9, 4)
    total, _ = strategist.loss(groups, *outcomes)
    swapped, _ = strategist.loss(replace(groups, views=groups.views.flip(2)), *outcomes)
    torch.testing.assert_close(total, swapped)


def test_equal_responses_of_a_group_are_not_contrasted():
    strategist, groups = make_strategist(), random_features()
    groups.response[:] = groups.response[:, :1]
    _, parts = strategist.loss(groups, torch.zeros(9, 10), torch.zeros(9, 4))
    assert parts["contrastive_loss"] == 0
    groups.response[:, 0] += 0.01
    _, parts = strategist.loss(groups, torch.zeros(9, 10), torch.zeros(9, 4))
    assert parts["contrastive_loss"] > 0.1


def test_a_whole_response_is_drawn_to_its_halves():
    """The alignment is the only term through which E learns of whole responses."""
    strategist, groups = make_strategist(), random_features()
    groups.response.requires_grad_()
    total, _ = strategist.loss(groups, torch.zeros(9, 10), torch.zeros(9, 4))
    total.backward()
    assert groups.response.grad.abs().sum() > 0


def test_everything_learns_but_the_momentum_head():
    strategist, queries = make_strategist(), random_features(seed=1).query
    strategist.remember(random_features(B=50, seed=2), torch.zeros(50, 4))
    total, _ = strategist.loss(random_features(), queries, torch.zeros(6, 4))
    total.backward()
    assert all(parameter.grad is None for parameter in strategist.PSE.parameters())
    for network in (strategist.E, strategist.P):
        assert all(parameter.grad.abs().sum() > 0 for parameter in network.parameters())


def test_the_momentum_head_starts_as_e_and_follows_it_slowly():
    strategist = Strategist(10, Config(samples=4))
    before = [parameter.clone() for parameter in strategist.PSE.parameters()]
    for slow, fast in zip(before, strategist.E.parameters()):
        assert torch.equal(slow, fast)
    strategist.remember(random_features(), torch.zeros(6, 4))
    strategist.learn(1, seeded(0))
    for old, slow, fast in zip(before, strategist.PSE.parameters(), strategist.E.parameters()):
        torch.testing.assert_close(slow, 0.99 * old + 0.01 * fast)
        assert not torch.equal(slow, old)


# Memory and learning


def test_e_learns_from_the_newest_groups_and_p_from_a_long_record():
    strategist = Strategist(10, Config(samples=4), recent=8)
    for number in range(5):
        features = random_features(seed=number)
        features.query[:] = number
        strategist.remember(features, torch.full((6, 4), number / 4))
    newest = strategist.recent.sample(100, seeded(0))["query"][:, 0].tolist()
    assert sorted(newest) == [3, 3, 4, 4, 4, 4, 4, 4]
    outcomes = strategist.outcomes.sample(100, seeded(0))
    assert sorted(outcomes["query"][:, 0].tolist()) == [n for n in range(5) for _ in range(6)]
    assert torch.equal(outcomes["correct"], (outcomes["query"][:, :1] / 4).expand(30, 4))


def test_each_kind_of_features_has_its_own_statistics():
    strategist, features = make_strategist(), random_features(B=40)
    features.query += 5
    features.response *= 3
    strategist.remember(features, torch.zeros(40, 4))
    for norm, rows in ((strategist.query_norm, features.query),
                       (strategist.response_norm, features.response.flatten(0, 1))):
        torch.testing.assert_close(norm.mean, rows.mean(0), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(norm.variance, rows.var(0, unbiased=False), atol=1e-4, rtol=1e-4)


def test_a_minibatch_is_32_groups_and_as_many_outcomes(monkeypatch):
    strategist = Strategist(10, Config(samples=4))
    strategist.remember(random_features(B=200), torch.zeros(200, 4))
    sizes, loss = [], strategist.loss

    def watch(groups, queries, correct):
        sizes.append((len(groups.query), len(queries), len(correct)))
        return loss(groups, queries, correct)
    monkeypatch.setattr(strategist, "loss", watch)
    strategist.learn(3, seeded(0))
    assert sizes == [(32, 128, 128)] * 3


def test_no_updates_change_nothing():
    strategist = make_strategist()
    strategist.remember(random_features(), torch.zeros(6, 4))
    before = {name: value.clone() for name, value in strategist.state_dict().items()}
    assert strategist.learn(0, seeded(0)) == {}
    for name, value in strategist.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_infinite_gradient_moves_nothing():
    strategist = make_strategist()
    strategist.remember(random_features(), torch.zeros(6, 4))
    strategist.learn(2, seeded(0))
    before = {name: value.clone() for name, value in strategist.state_dict().items()}
    hook = strategist.E[0].weight.register_hook(lambda gradient: gradient * math.inf)
    strategist.learn(2, seeded(1))
    for name, value in strategist.state_dict().items():
        assert torch.equal(value, before[name]), name
    hook.remove()
    strategist.learn(1, seeded(1))
    assert not torch.equal(strategist.E[0].weight, before["E.0.weight"])
    assert not torch.equal(strategist.PSE[0].weight, before["PSE.0.weight"])


def test_new_networks_follow_from_the_seed_and_use_up_no_random_numbers():
    torch.manual_seed(5)
    undisturbed = torch.rand(3)
    torch.manual_seed(5)
    strategist = Strategist(10, Config(samples=4, seed=1))
    assert torch.equal(torch.rand(3), undisturbed)
    same, other = (Strategist(10, Config(samples=4, seed=seed)) for seed in (1, 2))
    assert torch.equal(strategist.E[0].weight, same.E[0].weight)
    assert not torch.equal(strategist.E[0].weight, other.E[0].weight)


def test_no_gradient_goes_either_way(model):
    strategist = Strategist(36, Config(samples=4))
    rollout = generate(model, PROMPTS, 4, 8, 1.0, (1,), seeded(0))
    features = encode(model, rollout)
    correct = torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1]])
    strategist.observe(features, correct)
    signals = strategist.signals(features, correct, rollout, [], [])
    tensors = [value for value in vars(signals).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6
    assert not any(value.requires_grad for value in tensors)
    strategist.learn(2, seeded(0))
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.tensor([[1, 2, 3]])).square().sum().backward()
    assert all(parameter.grad is None for parameter in strategist.parameters())


def one_round(strategist: Strategist, number: int) -> tuple[Signals, dict]:
    features = random_features(seed=number)
    correct = torch.rand(6, 4, generator=seeded("correct", number)).round()
    strategist.observe(features, correct)
    signals = make_signals(strategist, features, correct)
    return signals, strategist.learn(2, seeded("learn", number))


def assert_checkpoint_is_complete(first: Strategist, second: Strategist) -> None:
    """Two strategists, of which the second begins in the middle, go on alike bit for bit."""
    for number in range(3):
        one_round(first, number)
    one_round(second, 99)  # what it knows so far is replaced
    second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    for number in range(3, 6):
        signals, losses = one_round(first, number)
        other_signals, other_losses = one_round(second, number)
        assert losses == other_losses
        for name in ("z_pre", "z_post", "success", "predicted", "state"):
            value, other = getattr(signals, name), getattr(other_signals, name)
            assert value is other is None or torch.equal(value, other), name
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_the_state_dict_is_a_complete_checkpoint():
    assert_checkpoint_is_complete(make_strategist(), make_strategist(seed=9))


# Signals


def change_weights(network, seed=0):
    for number, parameter in enumerate(network.parameters()):
        noise = torch.randn(parameter.shape, generator=seeded("change", seed, number))
        parameter.data += 0.2 * noise


@pytest.mark.parametrize("network, pre_moves, post_moves", [
    ("E", True, False), ("PSE", False, True), ("P", False, False)])
def test_z_pre_is_of_the_strategy_head_and_z_post_of_the_momentum_head(
        network, pre_moves, post_moves):
    strategist, features = make_strategist(), random_features()
    strategist.remember(features, torch.zeros(6, 4))
    before = make_signals(strategist, features)
    change_weights(getattr(strategist, network))
    after = make_signals(strategist, features)
    assert torch.equal(before.z_pre, after.z_pre) is not pre_moves
    assert torch.equal(before.z_post, after.z_post) is not post_moves
    assert torch.equal(before.success, after.success) is (network != "P")


@pytest.mark.parametrize("name, pre_moves, post_moves", [
    ("query", True, False), ("response", False, True), ("views", False, False),
    ("both", False, False)])
def test_z_pre_is_of_the_query_and_z_post_of_the_response_alone(name, pre_moves, post_moves):
    strategist, features = make_strategist(), random_features()
    strategist.remember(features, torch.zeros(6, 4))
    before = make_signals(strategist, features)
    changed = replace(features, **{name: getattr(features, name) + 0.5})
    after = make_signals(strategist, changed)
    assert torch.equal(before.z_pre, after.z_pre) is not pre_moves
    assert torch.equal(before.z_post, after.z_post) is not post_moves


def test_signals_by_hand():
    strategist, features = make_strategist(), random_features()
    strategist.remember(features, torch.zeros(6, 4))
    correct = torch.rand(6, 4, generator=seeded("correct")).round()
    with torch.no_grad():
        chance = strategist.P(strategist.query_norm(features.query)).sigmoid()
        z_pre = unit(strategist.E(strategist.query_norm(features.query)))[:, None]
        z_post = unit(strategist.PSE(strategist.response_norm(features.response)))
    signals = make_signals(strategist, features, correct)
    torch.testing.assert_close(signals.success, chance)
    torch.testing.assert_close(signals.z_pre, z_pre)
    torch.testing.assert_close(signals.z_post, z_post)
    assert torch.equal(signals.correct, correct)
    assert torch.equal(signals.logprobs, torch.full((6, 4, 2), -0.5))
    assert signals.lengths.tolist() == [[2] * 4] * 6
    assert signals.predicted is None
    assert signals.state is None
    assert signals.features is features


# What the networks know after learning. Queries of three kinds: all responses to the first kind go
# one way, to the second another way, and to the third half go each way.
HABITS = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]])
CHANCES = torch.tensor([1.0, 0.0, 0.5])  # of success


def make_habits(seed: int, habits=HABITS) -> tuple[Features, torch.Tensor]:
    """Features of 48 groups, and the kind (48,) of each query."""
    size, generator, directions = 12, seeded("habits", seed), seeded("directions")
    query_of = torch.randn(3, size, generator=directions)
    way_of = torch.randn(2, size, generator=directions)
    kind = torch.arange(48) % 3
    query = query_of[kind] + 0.2 * torch.randn(48, size, generator=generator)
    numbers = 0.2 * torch.randn(48, 1, size, generator=generator)  # all of a group share them
    response = way_of[habits[kind]] + numbers
    noise = 0.2 * torch.randn(48, 4, 2, size, generator=generator)
    both = (query[:, None] + response) / 2
    return Features(query, response, response[:, :, None] + noise, both), kind


def learn_habits(strategist: Strategist) -> Strategist:
    """Forty batches, 800 updates: the alignment of wholes and halves slows the first ones."""
    for number in range(40):
        features, kind = make_habits(number)
        draws = torch.rand(48, 4, generator=seeded("outcomes", number))
        strategist.observe(features, (draws < CHANCES[kind][:, None]).float())
        strategist.learn(20, seeded("learn", number))
    return strategist


@pytest.fixture(scope="module")
def learned() -> Strategist:
    return learn_habits(Strategist(12, Config(samples=4)))


def test_a_query_expects_what_its_responses_do(learned):
    """On queries that were never seen, SS is small for the habit and large for a stranger."""
    features, kind = make_habits(seed=99)
    ss, _ = reward.parts(make_signals(learned, features), learned.config)
    assert ss[kind < 2].max() < 0.1
    strangers, _ = make_habits(seed=99, habits=1 - HABITS)
    ss, _ = reward.parts(make_signals(learned, strangers), learned.config)
    assert ss[kind < 2].min() > 1


def test_a_query_that_is_answered_in_two_ways_expects_something_between_them(learned):
    features, kind = make_habits(seed=99)
    ss, _ = reward.parts(make_signals(learned, features), learned.config)
    one_way, other_way = ss[kind == 2][:, 0], ss[kind == 2][:, 1]
    assert one_way.min() > 0.1
    assert other_way.min() > 0.1
    assert (one_way + other_way - 2).abs().max() < 0.5  # opposite ways: 1 - cos and 1 + cos


def test_responses_that_go_the_same_way_lie_together_and_the_two_ways_apart(learned):
    features, kind = make_habits(seed=99)
    z = learned.achieved(features.response)
    first, second = z[kind == 0].flatten(0, 1), z[kind == 1].flatten(0, 1)
    assert (first @ first.T).min() > 0.8
    assert (second @ second.T).min() > 0.8
    assert (first @ second.T).max() < 0


def test_p_knows_how_often_a_query_is_solved(learned):
    features, kind = make_habits(seed=99)
    success = make_signals(learned, features).success[:, 0]
    assert success[kind == 0].min() > 0.8
    assert success[kind == 1].max() < 0.2
    assert 0.3 < success[kind == 2].mean() < 0.7


def test_a_success_surprises_where_failures_are_the_rule(learned):
    features, kind = make_habits(seed=99)
    _, sus = reward.parts(make_signals(learned, features, torch.ones(48, 4)), learned.config)
    assert sus[kind == 0].max() < 0.2
    assert sus[kind == 1].min() > 0.8
    _, sus = reward.parts(make_signals(learned, features, torch.zeros(48, 4)), learned.config)
    assert sus[kind == 0].min() > 0.8
    assert sus[kind == 1].max() < 0.2


def test_p_becomes_calibrated():
    """The first feature decides success: P's Brier score comes close to that of the truth."""
    strategist, features = Strategist(10, Config(samples=4)), random_features(B=512)
    truth = (2 * features.query[:, :1]).sigmoid()
    correct = (torch.rand(512, 4, generator=seeded("correct")) < truth).float()
    strategist.observe(features, correct)
    strategist.learn(60, seeded("learn"))
    unseen = random_features(B=512, seed=1)
    truth = (2 * unseen.query[:, :1]).sigmoid()
    correct = (torch.rand(512, 4, generator=seeded("other")) < truth).float()
    success = make_signals(strategist, unseen).success
    brier = (success - correct).square().mean().item()
    noise = (truth - correct).square().mean().item()
    print(f"Brier score {brier:.3f}, of the truth {noise:.3f}, variance {correct.var():.3f}")
    assert brier < noise + 0.03
    assert brier < 0.8 * correct.var().item()


def best_clusters(points, seed: int) -> list[int]:
    """k-means from k-means++ starts, as a measurement deserves."""
    generator = seeded("clusters", seed)
    centres = points[torch.randint(len(points), (1,), generator=generator)]
    for _ in range(11):
        distance = torch.cdist(points, centres).min(1).values.square()
        chosen = points[torch.multinomial(distance, 1, generator=generator)]
        centres = torch.cat((centres, chosen))
    return nearest(points, k_means(points, centres, 30)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("updates, least", [(12, 0.5), (40, 0.42)])
def test_clusters_of_embeddings_recover_the_true_strategies(real_policy, updates, least):
    """Thirty rounds on the base policy's responses, then 12 clusters of z_post on responses that
    the networks never saw: normalised mutual information with the true operators, beside that of
    the raw features. After three times as many updates whole responses, which are in no contrasted
    pair, still lie with their halves (without the alignment 0.34 would be left)."""
    policy = real_policy
    model = accelerate(lora.apply(policy.model))
    strategist, encoder = Strategist(model.config.hidden_size, Config()), BaseEncoder(model, 32)
    problems = data.load("countdown", "train", 33 * 32)
    prompts, held_out, labels = policy.encode(problems), [], []
    for step in range(33):
        rows = slice(32 * step, 32 * step + 32)
        rollout = generate(model, prompts[rows], 8, 32, 1.0, policy.eos_ids, seeded("r", step))
        responses = policy.decode(rollout)
        features = encoder.encode(problems[rows], prompts[rows], rollout, responses,
                                  seeded("views", step))
        if step < 30:
            strategist.observe(features, torch.zeros(32, 8))
            strategist.learn(updates, seeded("learn", step))
        else:
            held_out.append(features)
            labels += [problems[rows][n // 8].strategy_of(text) for n, text in enumerate(responses)]
    features = Features.join(held_out)
    legal = [n for n, label in enumerate(labels) if label]
    labels = [labels[n] for n in legal]
    z_post = strategist.achieved(features.response).flatten(0, 1)[legal]
    raw = features.response.flatten(0, 1)[legal]
    ours = [mutual_information(best_clusters(z_post, seed), labels) for seed in range(3)]
    theirs = [mutual_information(best_clusters(raw, seed), labels) for seed in range(3)]
    print(f"mutual information with the true strategies: z_post {ours}, raw features {theirs}")
    assert min(ours) > least
    assert max(theirs) < 0.3
