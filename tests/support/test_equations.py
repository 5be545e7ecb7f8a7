"""The equations' reading: z_post of query and response together, a world model, Eq. 2 and 3."""
import math
from dataclasses import replace

import pytest
import torch
import transformers

import lora
import reward
import train
from sample import generate, seeded
from strategy import BaseEncoder, Strategist
from support.config import Config
from support.equations import EquationsStrategist, JointEncoder
from tests.conftest import adapted, small_model
from tests.test_strategy import (
    HABITS,
    PROMPTS,
    assert_checkpoint_is_complete,
    change_weights,
    learn_habits,
    make_habits,
    make_signals,
    make_strategist,
    one_round,
    random_features,
    slow_info_nce,
    unit,
)


def make_equations(size=10, seed=0) -> EquationsStrategist:
    return make_strategist(size, seed, EquationsStrategist, reading="equations")


def test_query_and_response_as_one_are_the_last_layer_of_transformers(tmp_path):
    """With the adapters off, mean over the response's tokens but its last, in any micro-batch."""
    model = adapted()
    small_model().save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).model
    rollout = generate(model, PROMPTS, 3, 9, 1.0, (1, 2), seeded(0))
    for micro_batch in (1, 8):
        encoder = JointEncoder(model, micro_batch)
        features = encoder.encode([None] * 3, PROMPTS, rollout, [""] * 9, seeded(0))
        assert features.both.shape == features.response.shape
        for n in range(9):
            b, g = divmod(n, 3)
            answer = rollout.ids[n, :rollout.lengths[n]].tolist()
            with torch.no_grad():
                states = theirs(torch.tensor([PROMPTS[b] + answer])).last_hidden_state[0]
            expected = states[len(PROMPTS[b]):-1]
            if len(expected):
                torch.testing.assert_close(features.both[b, g], expected.mean(0), atol=1e-4,
                                           rtol=1e-4)
    assert all(layer.enabled for layer in lora.layers(model).values())
    plain = BaseEncoder(model, 8).encode([None] * 3, PROMPTS, rollout, [""] * 9, seeded(0))
    assert torch.equal(plain.views, features.views)


def test_the_next_state_is_no_linear_function_of_what_m_is_given():
    """As it was when s' was a weighted mean of the query's and the response's features."""
    model = small_model()
    prompts = [[3 + (b * 7 + k) % 30 for k in range(4)] for b in range(40)]
    rollout = generate(model, prompts, 4, 9, 1.0, (), seeded(0))  # all of one length
    features = JointEncoder(lora.apply(model), 8).encode([None] * 40, prompts, rollout, [""] * 160,
                                                         seeded(0))
    query = features.query[:, None].expand_as(features.response)
    given = torch.cat((query, features.response, torch.ones_like(query[..., :1])), -1).flatten(0, 1)
    state = features.both.flatten(0, 1)
    fit = given @ torch.linalg.lstsq(given, state).solution
    left = (state - fit).square().sum() / (state - state.mean(0)).square().sum()
    assert left > 0.05


def test_the_loss_adds_the_world_model_and_one_contrast():
    strategist, plain = make_equations(), make_strategist()
    strategist.remember(random_features(B=50, seed=1), torch.zeros(50, 4))
    own = plain.state_dict().keys() - {"_extra_state", *plain.recent.state_dict(prefix="recent.")}
    state = {name: value for name, value in strategist.state_dict().items() if name in own}
    plain.load_state_dict(state, strict=False)
    groups, outcomes = random_features(), (torch.zeros(9, 10), torch.zeros(9, 4))
    with torch.no_grad():
        total, parts = strategist.loss(groups, *outcomes)
        without, _ = plain.loss(groups, *outcomes)
        state = strategist.both_norm(groups.both)
        together = unit(strategist.E(state))
        achieved = unit(strategist.PSE(strategist.response_norm(groups.response)))
        query = strategist.query_norm(groups.query)[:, None].expand(6, 4, 10)
        action = strategist.action(strategist.response_norm(groups.response))
        predicted = strategist.M(torch.cat((query, action), dim=-1))
    world = (predicted - state).square().mean().item()
    contrast = slow_info_nce(together, achieved, "group")
    assert parts["world_loss"] == pytest.approx(world, rel=1e-4)
    assert (total - without).item() == pytest.approx(world + contrast, rel=1e-5)


def test_everything_learns_but_the_momentum_head():
    strategist, queries = make_equations(), random_features(seed=1).query
    strategist.remember(random_features(B=50, seed=2), torch.zeros(50, 4))
    total, _ = strategist.loss(random_features(), queries, torch.zeros(6, 4))
    total.backward()
    assert all(parameter.grad is None for parameter in strategist.PSE.parameters())
    for network in (strategist.E, strategist.P, strategist.action, strategist.M):
        assert all(parameter.grad.abs().sum() > 0 for parameter in network.parameters())
    learning = {id(each) for group in strategist.optimizer.param_groups for each in group["params"]}
    assert learning == {id(each) for each in strategist.parameters() if each.requires_grad}


def test_query_and_response_together_have_their_own_statistics():
    strategist, features = make_equations(), random_features(B=40)
    features.both -= 7
    strategist.remember(features, torch.zeros(40, 4))
    rows = features.both.flatten(0, 1)
    torch.testing.assert_close(strategist.both_norm.mean, rows.mean(0))
    torch.testing.assert_close(strategist.both_norm.variance, rows.var(0, unbiased=False))
    assert strategist.query_norm.mean.abs().max() < 1
    assert strategist.response_norm.mean.abs().max() < 1


@pytest.mark.parametrize("network, pre_moves, post_moves", [
    ("E", True, True), ("PSE", False, False)])
def test_both_embeddings_are_of_the_strategy_head(network, pre_moves, post_moves):
    strategist, features = make_equations(), random_features()
    strategist.remember(features, torch.zeros(6, 4))
    before = make_signals(strategist, features)
    change_weights(getattr(strategist, network))
    after = make_signals(strategist, features)
    assert torch.equal(before.z_pre, after.z_pre) is not pre_moves
    assert torch.equal(before.z_post, after.z_post) is not post_moves


@pytest.mark.parametrize("name, moves", [("query", False), ("response", False), ("both", True)])
def test_z_post_is_of_query_and_response_together(name, moves):
    strategist, features = make_equations(), random_features()
    strategist.remember(features, torch.zeros(6, 4))
    before = make_signals(strategist, features)
    changed = replace(features, **{name: getattr(features, name) + 0.5})
    after = make_signals(strategist, changed)
    assert torch.equal(before.z_post, after.z_post) is not moves
    assert torch.equal(before.state, after.state) is not moves
    assert torch.equal(before.predicted, after.predicted) is moves  # M sees only s and a


def test_z_post_by_hand():
    strategist, features = make_equations(), random_features()
    strategist.remember(features, torch.zeros(6, 4))
    with torch.no_grad():
        expected = unit(strategist.E(strategist.both_norm(features.both)))
    torch.testing.assert_close(make_signals(strategist, features).z_post, expected)


@pytest.mark.parametrize("size", [8, 128])
def test_the_prediction_error_of_eq_3_does_not_grow_with_the_size_of_the_features(size):
    strategist, features = make_equations(size), random_features(B=100, D=size)
    strategist.remember(features, torch.zeros(100, 4))
    signals = make_signals(strategist, features)
    norms = signals.state.norm(dim=-1)
    assert 0.85 < norms.mean().item() < 1.05  # standardised features have a norm of sqrt(D)
    with torch.no_grad():
        predicted = strategist.next_state(features.query, features.response)
    torch.testing.assert_close(signals.predicted, predicted / math.sqrt(size))
    ss, sus = reward.parts(signals, strategist.config)
    error = (predicted - strategist.both_norm(features.both)).norm(dim=-1) / math.sqrt(size)
    torch.testing.assert_close(sus, error * (1 - ss), atol=1e-5, rtol=1e-4)


def test_no_signal_carries_a_gradient():
    strategist = make_equations()
    signals, _ = one_round(strategist, 0)
    tensors = [value for value in vars(signals).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 8
    assert not any(value.requires_grad for value in tensors)


def test_the_state_dict_is_a_complete_checkpoint():
    assert_checkpoint_is_complete(make_equations(), make_equations(seed=9))


@pytest.fixture(scope="module")
def learned() -> Strategist:
    return learn_habits(EquationsStrategist(12, Config(samples=4, reading="equations")))


def test_stability_is_high_for_the_habit_and_low_for_a_stranger(learned):
    """Eq. 2 on queries that were never seen; surprise (Eq. 3) goes the other way."""
    features, kind = make_habits(seed=99)
    ss, sus = reward.parts(make_signals(learned, features), learned.config)
    strangers, _ = make_habits(seed=99, habits=1 - HABITS)
    other_ss, other_sus = reward.parts(make_signals(learned, strangers), learned.config)
    assert ss[kind < 2].min() > 0.9
    assert sus[kind < 2].max() < 0.1
    for way in (0, 1):
        assert other_ss[kind == way].mean() < 0.4
        assert other_sus[kind == way].mean() > 0.2


def test_m_learns_to_predict_the_next_state(learned):
    features, _ = make_habits(seed=99)
    signals = make_signals(learned, features)
    error = (signals.predicted - signals.state).norm(dim=-1).mean().item()
    fresh = EquationsStrategist(12, Config(samples=4, reading="equations"))
    fresh.remember(features, torch.zeros(48, 4))
    signals = make_signals(fresh, features)
    error_at_first = (signals.predicted - signals.state).norm(dim=-1).mean().item()
    print(f"error of M {error:.2f}, at first {error_at_first:.2f}")
    assert error < 0.4 * error_at_first


def test_m_becomes_better_with_updates():
    strategist, features = make_equations(), random_features(B=64)
    features.both = (features.query[:, None] + features.response) / 2
    strategist.remember(features, torch.zeros(64, 4))
    first = strategist.learn(1, seeded("learn"))["world_loss"]
    last = strategist.learn(100, seeded("learn"))["world_loss"]
    assert last < 0.3 * first


@pytest.mark.parametrize("reading, kind", [
    ("algorithm", Strategist), ("equations", EquationsStrategist)])
def test_the_flag_chooses_the_strategist(reading, kind, cache, tmp_path):
    config = Config(reading=reading, cache=str(cache), run=str(tmp_path), device="cpu")
    assert type(train.Run(config).strategist) is kind
