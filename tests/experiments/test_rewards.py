"""The other intrinsic rewards by hand-computed numbers, and that those with a memory keep it."""
import math
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

import reward
from data import Countdown, Question
from experiments import rewards
from reward import Signals
from sample import seeded
from strategy import DIMENSION, Features
from support import files
from support.clustering import CLUSTERS
from support.config import Config

ADD, OTHER = "3+8=11;11+5=16", "8*3=24;24-5=19"  # strategies ++ and *-
PROBLEM = Countdown((3, 8, 5), 16)
MEMORIES = ["rnd", "count", "uniqueness", "oracle", "repository"]
FUNCTIONS = ["novelty", "icm", "passk", "focal", "unlikeliness", "smoothing",
             "elliptical", "shuffled", "flat", "random_embeddings", "group_oracle"]


def axes(*numbers: int) -> torch.Tensor:
    """Unit vectors along these axes, (len(numbers), DIMENSION)."""
    return torch.eye(DIMENSION)[list(numbers)]


def make_signals(**changes) -> Signals:
    """Two problems with three responses each; the strategies are axes of the embedding space."""
    B, G = 2, 3
    fields = dict(
        correct=torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        logprobs=torch.zeros(B, G, 2), lengths=torch.full((B, G), 2), problems=[PROBLEM] * B,
        responses=[ADD] * (B * G),
        features=Features(torch.zeros(B, 4), torch.zeros(B, G, 4), torch.zeros(B, G, 2, 4)),
        z_pre=axes(0)[None].expand(B, 1, DIMENSION), z_post=axes(0, 1, 0, 2, 2, 1).view(B, G, -1),
        success=torch.full((B, 1), 0.5))
    return Signals(**{**fields, **changes})


def random_signals(number: int) -> Signals:
    """Four problems with five responses, different for each number."""
    generator = seeded("signals", number)
    response = torch.randn(4, 5, 6, generator=generator)
    features = Features(torch.zeros(4, 6), response, response[:, :, None].repeat(1, 1, 2, 1))
    noise = 0.02 * torch.randn(20, DIMENSION, generator=generator)
    ways = axes(*torch.randint(6, (20,), generator=generator).tolist())
    z_post = (ways + noise).view(4, 5, DIMENSION)
    texts = [(ADD, OTHER, "8-3=5;5*5=25", "nonsense")[kind]
             for kind in torch.randint(4, (20,), generator=generator).tolist()]
    return make_signals(
        correct=torch.rand(4, 5, generator=generator).round(), problems=[PROBLEM] * 4,
        responses=texts, features=features, z_post=nn.functional.normalize(z_post, dim=-1),
        z_pre=axes(0)[None].expand(4, 1, DIMENSION), success=torch.full((4, 1), 0.3))


@pytest.mark.parametrize("name", [*FUNCTIONS, *MEMORIES])
def test_every_reward_is_found_by_its_flag(name):
    found = reward.find_method(f"experiments.rewards:{name}")
    assert found is getattr(rewards, name)
    assert isinstance(found, type) is (name in MEMORIES)  # train.py makes an object of a class


def test_pass_at_k_training_pays_wrong_responses_the_chance_of_company():
    """With c added, and centred in the group, the advantages of Chen et al. before division."""
    G, k = 8, rewards.PASS_K
    for right in range(G + 1):
        correct = torch.tensor([[1.0] * right + [0.0] * (G - right)])
        signals = make_signals(correct=correct)
        paid = correct + rewards.passk(signals, Config(gate="none", bonus="added"))
        wrong = G - right
        R = 1 - math.comb(wrong, k) / math.comb(G, k)
        company = 1 - math.comb(max(wrong - 1, 0), k - 1) / math.comb(G - 1, k - 1)
        expected = torch.tensor([[1.0] * right + [company] * wrong])
        torch.testing.assert_close(paid, expected)
        assert paid.mean().item() == pytest.approx(R, abs=1e-6)


def test_rewards_for_wrong_responses_need_a_gate_that_lets_them_through():
    for name, gate in (("passk", "none"), ("smoothing", "group")):
        for config in (Config(bonus="added"), Config(gate=gate, bonus="scaled")):
            with pytest.raises(ValueError, match=f"--gate {gate} --bonus added"):
                getattr(rewards, name)(random_signals(0), config)
    with pytest.raises(ValueError, match="--samples 4"):
        rewards.passk(make_signals(), Config(gate="none", bonus="added"))


def test_focal_is_the_share_of_wrong_responses_of_the_group():
    bonus = rewards.focal(make_signals(), Config())
    torch.testing.assert_close(bonus, torch.tensor([[1 / 3] * 3, [1.0] * 3]))


LOGPROBS = torch.tensor([[[-1.0, -1.0], [-3.0, 0.0], [-0.5, 0.0]],
                         [[-1.0, 0.0], [-2.0, 0.0], [-3.0, 0.0]]])


def test_unlikeliness_ranks_by_the_probability_of_the_whole_response():
    bonus = rewards.unlikeliness(make_signals(logprobs=LOGPROBS), Config())
    ranks = torch.tensor([[1.0, 0.0, 2.0], [2.0, 1.0, 0.0]])
    torch.testing.assert_close(bonus, -ranks / 3)


def test_smoothing_pays_the_improbable_if_right_and_the_probable_if_wrong():
    bonus = rewards.smoothing(make_signals(logprobs=LOGPROBS), Config(gate="group", bonus="added"))
    torch.testing.assert_close(bonus, torch.tensor([[2.0, 3.0, -0.5], [-1.0, -2.0, -3.0]]))


def test_the_elliptical_bonus_is_the_leverage_of_a_response_in_its_group():
    signals = random_signals(0)
    bonus = rewards.elliptical(signals, Config())
    for b, group in enumerate(signals.features.response):
        h = nn.functional.normalize(group - group.mean(0), dim=-1)
        inverse = torch.linalg.inv(torch.eye(6) + h.T @ h)  # over features, not responses
        torch.testing.assert_close(bonus[b], (h @ inverse * h).sum(-1), atol=1e-5, rtol=1e-4)


def test_shuffled_deals_the_same_bonuses_to_others_who_earn():
    signals = random_signals(2)
    config = Config(gate="mixed")
    earns = reward.gate(signals.correct, "mixed") > 0
    own, dealt = reward.sus(signals, config), rewards.shuffled(signals, config)
    assert earns.sum() > 4
    assert sorted(own[earns].tolist()) == sorted(dealt[earns].tolist())
    assert not torch.equal(own[earns], dealt[earns])
    assert torch.equal(own[~earns], dealt[~earns])
    assert torch.equal(dealt, rewards.shuffled(signals, config))  # a resumed run deals alike
    assert not torch.equal(dealt, rewards.shuffled(signals, replace(config, seed=1)))


def test_flat_pays_everybody_the_mean_of_those_who_earn():
    signals = random_signals(2)
    earns = reward.gate(signals.correct, "mixed") > 0
    mean = reward.sus(signals, Config())[earns].mean()
    torch.testing.assert_close(rewards.flat(signals, Config()), mean.expand(4, 5))


def test_random_embeddings_keep_the_success_surprise_and_nothing_else():
    signals = random_signals(3)
    config = Config(lambda_ss=0.0, sus_baseline="none")
    assert torch.equal(rewards.random_embeddings(signals, config), reward.sus(signals, config))
    found = rewards.random_embeddings(signals, Config())
    assert not torch.allclose(found, reward.sus(signals, Config()), atol=0.1)
    moved = replace(signals, z_post=signals.z_post.flip(1))
    assert torch.equal(rewards.random_embeddings(moved, Config()), found)  # blind to strategies


def test_the_repositorys_reward_is_novelty_times_difficulty():
    response = torch.zeros(2, 3, 4)
    response[0] = torch.eye(4)[:3]
    response[1] = torch.eye(4)[[0, 0, 0]]
    problems = [PROBLEM, Countdown((1, 2, 3), 6)]
    features = Features(torch.zeros(2, 4), response, response[:, :, None])
    signals = make_signals(features=features, problems=problems,
                           correct=torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
    method = rewards.repository(4, Config())
    first = method(signals, Config())
    # Two correct responses at a right angle; a lone correct one has novelty 1.
    torch.testing.assert_close(first, 0.5 * torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))
    second = method(signals, Config())
    accuracy = torch.tensor([[0.5 + 0.1 * (2 / 3 - 0.5)], [0.5 + 0.1 * (1 / 3 - 0.5)]])
    torch.testing.assert_close(second, first / 0.5 * (1 - accuracy))


def test_the_group_oracle_counts_true_strategies():
    signals = make_signals(responses=[ADD, OTHER, ADD, ADD, "no", "no"],
                           correct=torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]))
    bonus = rewards.group_oracle(signals, Config())
    torch.testing.assert_close(bonus, torch.tensor([[0.5, 1.0, 0.5], [1.0, 1.0, 1.0]]))


def test_novelty_is_the_distance_to_the_groups_other_correct_responses():
    half = (axes(0) + axes(1)) / 2  # a cosine of sqrt(1/2) with either
    z_post = torch.stack((torch.cat((axes(0, 1), half)), axes(3, 4, 5)))
    bonus = rewards.novelty(make_signals(z_post=z_post), Config())
    near = 1 - math.sqrt(0.5)
    # The second group has no correct response to differ from.
    torch.testing.assert_close(bonus, torch.tensor([[1.0, 1.0, near], [0.0, 0.0, 0.0]]))
    all_right = make_signals(z_post=z_post, correct=torch.ones(2, 3))
    expected = torch.tensor([[(1 + near) / 2, (1 + near) / 2, near], [1.0, 1.0, 1.0]])
    torch.testing.assert_close(rewards.novelty(all_right, Config()), expected)


def test_novelty_does_not_depend_on_the_length_of_embeddings():
    signals = random_signals(0)
    longer = replace(signals, z_post=7 * signals.z_post)
    torch.testing.assert_close(rewards.novelty(signals, Config()),
                               rewards.novelty(longer, Config()))


def test_icm_is_the_error_of_the_world_model():
    predicted = torch.zeros(2, 3, 2)
    state = torch.tensor([[[3.0, 4.0]] * 3, [[0.0, 1.0], [0.0, 0.0], [6.0, -8.0]]])
    bonus = rewards.icm(make_signals(predicted=predicted, state=state), Config())
    torch.testing.assert_close(bonus, torch.tensor([[5.0, 5.0, 5.0], [1.0, 0.0, 10.0]]))


def test_icm_needs_the_equations_reading():
    with pytest.raises(ValueError, match="icm needs --reading equations"):
        rewards.icm(make_signals(), Config())


def test_rnd_is_the_squared_distance_of_two_networks():
    signals = random_signals(0)
    method = rewards.rnd(6, Config(strategy_updates=0))
    response = signals.features.response.flatten(0, 1)
    x = (response - response.mean(0)) / (response.std(0, unbiased=False) + 1e-5)
    with torch.no_grad():
        expected = (method.random(x) - method.distilled(x)).square().mean(-1).view(4, 5)
    torch.testing.assert_close(method(signals, Config()), expected, atol=1e-5, rtol=1e-4)
    assert expected.min() > 0


def test_rnd_pays_less_and_less_for_what_it_has_seen():
    method, seen, unseen = rewards.rnd(6, Config()), random_signals(0), random_signals(1)
    at_first = method(seen, Config()).mean().item()
    frozen = [parameter.clone() for parameter in method.random.parameters()]
    for _ in range(100):
        bonus = method(seen, Config())
    assert not bonus.requires_grad
    assert bonus.mean().item() < 0.1 * at_first
    assert method(unseen, Config()).mean() > 3 * bonus.mean()
    for before, after in zip(frozen, method.random.parameters()):
        assert torch.equal(before, after)


def test_rnd_pays_before_it_learns_from_the_batch():
    """Two that differ only in how much they learn pay the same for their first batch."""
    idle, busy = rewards.rnd(6, Config(strategy_updates=0)), rewards.rnd(6, Config())
    assert torch.equal(idle(random_signals(0), Config()), busy(random_signals(0), Config()))
    assert not torch.equal(idle(random_signals(0), Config()), busy(random_signals(0), Config()))


def test_rnd_follows_from_the_seed_and_uses_up_no_random_numbers():
    torch.manual_seed(5)
    undisturbed = torch.rand(3)
    torch.manual_seed(5)
    method = rewards.rnd(6, Config(seed=1))
    assert torch.equal(torch.rand(3), undisturbed)
    first = method(random_signals(0), Config())
    assert torch.equal(first, rewards.rnd(6, Config(seed=1))(random_signals(0), Config()))
    assert not torch.equal(first, rewards.rnd(6, Config(seed=2))(random_signals(0), Config()))


def test_clusters_follow_the_embeddings():
    """The first batch places the centres; each later batch moves them to the means around them."""
    method, config = rewards.count(4, Config()), Config()
    method(make_signals(z_post=axes(0, 0, 1, 1, 1, 2).view(2, 3, -1)), config)
    for axis in axes(0, 1, 2):
        assert torch.cdist(axis[None], method.centres).min() < 1e-6
    moved = axes(0) + 0.2 * axes(3)
    z_post = torch.cat((moved, moved, axes(1, 1, 1, 2))).view(2, 3, -1)
    method(make_signals(z_post=z_post), config)
    torch.testing.assert_close(method.centres[:1], moved)  # where the first response was before


def test_count_pays_one_over_the_root_of_a_clusters_share():
    method = rewards.count(4, Config())
    z_post = axes(0, 0, 0, 0, 1, 1).view(2, 3, -1)
    bonus = method(make_signals(z_post=z_post), Config())
    four, two = math.sqrt(6 / 4), math.sqrt(6 / 2)  # 1 / sqrt(4 of 6), 1 / sqrt(2 of 6)
    torch.testing.assert_close(bonus, torch.tensor([[four, four, four], [four, two, two]]))


def test_count_forgets_a_tenth_of_what_it_counted_with_every_batch():
    method = rewards.count(4, Config())
    method(make_signals(z_post=axes(0, 0, 0, 0, 1, 1).view(2, 3, -1)), Config())
    bonus = method(make_signals(z_post=axes(0, 1, 1, 1, 1, 1).view(2, 3, -1)), Config())
    zero, one = 0.9 * 4 + 1, 0.9 * 2 + 5
    total = zero + one
    expected = torch.tensor([[(total / zero) ** 0.5] + [(total / one) ** 0.5] * 2,
                             [(total / one) ** 0.5] * 3])
    torch.testing.assert_close(bonus, expected)
    assert method.shares.sum().item() == pytest.approx(0.9 * 6 + 6)


def test_uniqueness_is_one_over_the_groups_correct_responses_of_the_same_cluster():
    z_post = axes(0, 1, 0, 2, 2, 1).view(2, 3, -1)
    method = rewards.uniqueness(4, Config())
    bonus = method(make_signals(z_post=z_post), Config())
    torch.testing.assert_close(bonus, torch.ones(2, 3))  # no cluster has two correct responses
    correct = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    bonus = method(make_signals(z_post=z_post, correct=correct), Config())
    torch.testing.assert_close(bonus, torch.tensor([[0.5, 1.0, 0.5], [0.5, 0.5, 1.0]]))
    correct = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    bonus = method(make_signals(z_post=z_post, correct=correct), Config())
    torch.testing.assert_close(bonus, torch.tensor([[0.5, 1.0, 0.5], [1.0, 1.0, 1.0]]))


def test_oracle_is_minus_the_log_of_the_true_strategys_share():
    method = rewards.oracle(4, Config())
    responses = [ADD, ADD, ADD, OTHER, "nonsense", "3+8=12;12+5=17"]
    bonus = method(make_signals(responses=responses), Config())
    common, rare = -math.log(3 / 4), -math.log(1 / 4)  # the two illegal responses do not count
    torch.testing.assert_close(bonus, torch.tensor([[common] * 3, [rare, 0.0, 0.0]]))


def test_oracle_forgets_a_tenth_of_what_it_counted_with_every_batch():
    method = rewards.oracle(4, Config())
    method(make_signals(responses=[ADD] * 4 + [OTHER] * 2), Config())
    bonus = method(make_signals(responses=[OTHER] * 6), Config())
    assert method.table == pytest.approx({"++": 3.6, "*-": 7.8})
    torch.testing.assert_close(bonus, torch.full((2, 3), -math.log(7.8 / 11.4)))


def test_oracle_asks_each_problem_about_its_own_responses():
    method = rewards.oracle(4, Config())
    other = Countdown((1, 2, 3), 6)  # for which ADD is illegal
    bonus = method(make_signals(problems=[PROBLEM, other], responses=[ADD, OTHER] * 3), Config())
    torch.testing.assert_close(bonus, torch.tensor([
        [-math.log(2 / 3), -math.log(1 / 3), -math.log(2 / 3)], [0.0, 0.0, 0.0]]))


def test_oracle_needs_problems_with_true_strategies():
    question = Question("What is 1 + 1?", 2)
    with pytest.raises(ValueError, match="true strategies, which gsm8k does not have"):
        rewards.oracle(4, Config())(make_signals(problems=[question] * 2), Config(data="gsm8k"))


@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_survives_a_checkpoint_bit_for_bit(name, tmp_path):
    """Call, save to a file, load into a fresh one that knows something else, call both."""
    make = getattr(rewards, name)
    method, other = make(6, Config(seed=0)), make(6, Config(seed=7))
    config = Config()
    for number in range(3):
        method(random_signals(number), config)
    other(random_signals(9), config)
    differ = method(random_signals(3), config), other(random_signals(3), config)
    assert not torch.equal(*differ) or name == "uniqueness"
    files.write_tensors(tmp_path / "state.safetensors", method.state_dict())
    tensors = files.read_tensors(tmp_path / "state.safetensors")
    files.check_tensors(tensors, other.state_dict(), "state.safetensors")
    other.load_state_dict(tensors)
    for number in range(4, 7):
        bonus = method(random_signals(number), config)
        assert torch.equal(bonus, other(random_signals(number), config))
        assert bonus.shape == (4, 5)
        assert bonus.isfinite().all()
        assert bonus.std() > 0
    for key, tensor in method.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key


@pytest.mark.parametrize("name", MEMORIES)
def test_a_new_memory_can_be_saved_and_loaded(name):
    make = getattr(rewards, name)
    method, other = make(6, Config(seed=0)), make(6, Config(seed=7))
    other.load_state_dict(method.state_dict())
    signals = random_signals(0)
    assert torch.equal(method(signals, Config()), other(signals, Config()))


def test_there_are_as_many_centres_as_the_evaluation_has_clusters():
    method = rewards.count(4, Config())
    method(random_signals(0), Config())
    assert method.centres.shape == (CLUSTERS, DIMENSION)
    assert len(method.centres.unique(dim=0)) == CLUSTERS
