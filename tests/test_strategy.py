"""The strategy networks: parts by hand, isolation from the policy, and the heart of it: does E see strategies?"""
import math
from collections import Counter

import pytest
import torch
from conftest import mutual_information, small_model

import data
import lora
import reward
import sample
import strategy
from encoder import Features, base_features, join
from grpo import LossSettings
from strategy import Frequencies, Networks, Replay, Settings, Standardise, Strategist, contrast, k_means, nearest


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_features(B=6, G=4, D=10, seed=0):
    generator = seeded(seed)
    return Features(*(torch.randn(*shape, D, generator=generator) for shape in ((B,), (B, G), (B, G, 2), (B, G))))


def test_the_head_is_the_papers():
    kinds = [type(module).__name__ for module in Networks(10, 128, 0).head]
    assert kinds == ["Linear", "LayerNorm", "ReLU", "Linear", "LayerNorm", "ReLU", "Linear"]
    z = Networks(10, 128, 0).embed(torch.randn(3, 10), "query")
    assert z.shape == (3, 128)
    torch.testing.assert_close(z.norm(dim=-1), torch.ones(3))


def test_info_nce_by_hand():
    anchors = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])
    loss, accuracy = contrast(anchors, anchors, 0.5, "group")
    distinct, same = math.log(1 + math.exp(-2)), math.log(2)            # -log e^2 / (e^2 + e^0), and two that look alike
    assert loss.item() == pytest.approx((distinct + same) / 2) and accuracy.item() == 0.75
    loss, _ = contrast(anchors, anchors, 0.5, "batch")                  # three of the four look alike
    assert loss.item() == pytest.approx((3 * math.log(3 + math.exp(-2)) + math.log(1 + 3 * math.exp(-2))) / 4)


def test_standardise_matches_the_statistics_of_all_it_saw():
    norm, x = Standardise(3), 5 + 2 * torch.randn(100, 3, generator=seeded())
    for part in x.split([7, 33, 60]):
        norm.update(part)
    torch.testing.assert_close(norm.mean, x.mean(0))
    torch.testing.assert_close(norm.variance, x.var(0, unbiased=False))
    torch.testing.assert_close(norm(x).std(0, unbiased=False), torch.ones(3), atol=1e-3, rtol=1e-3)


def test_standardise_forgets():
    norm = Standardise(1, memory=10)
    for value in [0.0] * 50 + [1.0] * 50:                               # 50 further steps of a tenth at most: (10 / 11)^50 is left
        norm.update(torch.full((1, 1), value))
    assert norm.count == 10 and norm.mean.item() == pytest.approx(1 - (10 / 11) ** 50, abs=1e-5)


def test_a_scaled_reward_is_divided_by_its_deviation():
    strategist = Strategist(small_model(), Settings())
    values = torch.tensor([[1.0, 3.0], [5.0, 7.0]])                     # mean 4, deviation sqrt(5)
    torch.testing.assert_close(strategist.scaled(values), values / math.sqrt(5))
    assert torch.equal(Strategist(small_model(), Settings()).scaled(torch.ones(2, 2)), torch.ones(2, 2))


def test_the_equations_reading_adds_one_contrast():
    networks, batch = Networks(10, 8, 0), random_features()
    networks.observe(batch)
    arguments = (networks, batch, torch.zeros(9, 10), torch.zeros(9, 4), 0.5, "group")
    (apart, _), (together, _) = strategy.loss(*arguments), strategy.loss(*arguments, together=True)
    expected, _ = contrast(networks.embed(batch.both, "both"), networks.embed(batch.response, "response", momentum=True), 0.5, "group")
    assert (together - apart).item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_momentum_head_follows_slowly_and_learns_nothing():
    networks = Networks(10, 8, 0)
    before = networks.target[0].weight.clone()
    assert torch.equal(before, networks.head[0].weight)
    networks.head[0].weight.data += 1
    networks.follow(0.9)
    torch.testing.assert_close(networks.target[0].weight, before + 0.1)
    total, _ = strategy.loss(networks, random_features(), torch.zeros(9, 10), torch.zeros(9, 4), 0.5, "group")
    total.backward()
    assert all(p.grad is None for p in [*networks.target.parameters(), *networks.random.parameters()])
    for name in ("head", "predictor", "action", "world", "distilled"):
        assert all(p.grad is not None for p in getattr(networks, name).parameters()), name


def test_responses_that_say_the_same_are_no_negatives():
    anchors = torch.eye(4)[:3][None]                                       # three responses, the first two alike
    same = torch.tensor([[[True, True, False], [True, True, False], [False, False, True]]])
    anchors[0, 1] = anchors[0, 0]
    loss, accuracy = contrast(anchors, anchors, 0.5, "group", same)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-2)) * 2 / 3 + math.log(1 + 2 * math.exp(-2)) / 3)
    assert accuracy == 1
    whole, _ = contrast(anchors.repeat(2, 1, 1), anchors.repeat(2, 1, 1), 0.5, "batch", same.repeat(2, 1, 1))
    # the other group's copies stay negatives: e^2 + 2 e^2 + 2 for the first two, e^2 + e^2 + 4 for the third
    e = math.exp(2)
    assert whole.item() == pytest.approx(2 / 3 * math.log((e + 2 * e + 2) / e) + 1 / 3 * math.log((2 * e + 4) / e))


def test_the_replay_buffer_is_bounded_and_uniform():
    replay = Replay(10)
    for start in range(0, 24, 4):
        rows = torch.arange(start, start + 4.0)
        replay.add(query=rows[:, None].expand(4, 3), correct=-rows)
    assert sorted(replay.store["query"][:, 0].tolist()) == list(range(14, 24))
    drawn = Counter(row for seed in range(2000) for row in replay.sample(3, seeded(seed))["query"][:, 0].tolist())
    assert len(drawn) == 10 and all(abs(count - 600) < 100 for count in drawn.values())
    everything = replay.sample(20, seeded())
    assert len(set(everything["query"][:, 0].tolist())) == 10                           # none twice
    assert torch.equal(everything["query"][:, 0], -everything["correct"])               # rows stay together
    large = Replay(3)
    large.add(query=torch.zeros(8, 4))
    assert large.store["query"].shape[0] == 3 and large.added == 8


def test_frequencies_by_hand():
    seen = Frequencies(decay=0.5)
    seen.update(["a", "a", None, "b"])
    seen.update(["b"])
    assert seen.counts == {"a": 1.0, "b": 1.5}
    torch.testing.assert_close(seen.of(["a", "b", None]), torch.tensor([0.4, 0.6, 1.0]))


def test_k_means_finds_what_is_there():
    points = torch.cat([torch.randn(50, 2, generator=seeded(i)) * 0.1 + torch.tensor(centre) for i, centre in
                        enumerate(([0.0, 0.0], [5.0, 0.0], [0.0, 5.0]))])
    centres = k_means(points, points[[0, 60, 149]], 10)
    assert [Counter(part.tolist()).most_common(1)[0][1] for part in nearest(points, centres).split(50)] == [50, 50, 50]
    empty = k_means(points, torch.tensor([[0.0, 0.0], [99.0, 99.0]]), 3)
    assert empty.isfinite().all() and torch.equal(empty[1], torch.tensor([99.0, 99.0]))


def test_p_becomes_calibrated_and_m_learns():
    """A world in which the first feature decides success: P's Brier score approaches the noise, M's error falls."""
    networks, losses = Networks(10, 32, 0), []
    batch = random_features(512, 4)
    batch.both = 0.5 * batch.query[:, None] + 0.5 * batch.response
    truth = (2 * batch.query[:, 0]).sigmoid()
    correct = (torch.rand(512, 4, generator=seeded(3)) < truth[:, None]).float()
    networks.observe(batch)
    optimizer = torch.optim.AdamW([p for p in networks.parameters() if p.requires_grad], lr=1e-3)
    for step in range(200):
        rows = torch.randperm(512, generator=seeded(step))[:64]
        part = Features(*(value[rows] for value in vars(batch).values()))
        total, metrics = strategy.loss(networks, part, part.query, correct[rows], 0.5, "group")
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(metrics["world_loss"])
    probability = networks.success_logit(batch.query).sigmoid()[:, None]
    brier, noise = (probability - correct).square().mean().item(), (truth[:, None] - correct).square().mean().item()
    assert brier < noise + 0.02 and brier < 0.8 * correct.var().item()
    assert losses[-1] < 0.3 * losses[0]


def make_strategist(**changes):
    model = lora.apply(small_model(), 4)
    strategist = Strategist(model, Settings(**{"dimension": 16, "recent": 8, "buffer": 12, "batch": 4, "clusters": 3, **changes}))
    rollout = sample.generate(model, [[3, 4], [5, 6, 7]], 4, 8, 1.0, (1,), seeded())
    return model, strategist, rollout


def one_round(strategist, rollout, number):
    found, _ = strategist.encode([[3, 4], [5, 6, 7]], rollout, ["", ""], [""] * 8, LossSettings(), seeded(number))
    correct = torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 1]])
    strategist.observe(found, correct)
    strategist.tally(found, ["a", None, "b", "a"] * 2)
    signals = strategist.signals(found, correct, rollout, ["a", None, "b", "a"] * 2)
    strategist.scaled(reward.sus(signals))
    strategist.update(2, seeded(number))
    return signals


def test_no_gradient_goes_either_way():
    model, strategist, rollout = make_strategist()
    signals = one_round(strategist, rollout, 0)
    assert all(not value.requires_grad for value in vars(signals).values() if isinstance(value, torch.Tensor))
    assert all(parameter.grad is None for parameter in model.parameters())          # their loss reached no policy weight
    before = {name: value.clone() for name, value in strategist.networks.state_dict().items()}
    strategist.optimizer.zero_grad()
    model(torch.tensor([[1, 2, 3]])).square().sum().backward()
    assert all(parameter.grad is None for parameter in strategist.networks.parameters())
    assert all(torch.equal(value, before[name]) for name, value in strategist.networks.state_dict().items())


def test_an_infinite_gradient_moves_nothing():
    _, strategist, rollout = make_strategist()
    one_round(strategist, rollout, 0)
    before = {name: value.clone() for name, value in strategist.networks.state_dict().items()}
    hook = next(iter(strategist.learning.values())).register_hook(lambda gradient: gradient * math.inf)
    strategist.update(2, seeded())
    assert all(torch.equal(value, before[name]) for name, value in strategist.networks.state_dict().items())
    hook.remove()
    strategist.update(1, seeded())
    assert any(not torch.equal(value, before[name]) for name, value in strategist.networks.state_dict().items())


@pytest.mark.parametrize("method", reward.METHODS)
@pytest.mark.parametrize("reading", ["algorithm", "equations"])
def test_every_method_is_finite_on_real_signals(method, reading):
    _, strategist, rollout = make_strategist(reading=reading)
    for number in range(3):
        bonus = reward.METHODS[method](one_round(strategist, rollout, number))
        assert bonus.shape == (2, 4) and bonus.isfinite().all()


def test_state_comes_back_bit_for_bit():
    _, strategist, rollout = make_strategist()
    for number in range(3):
        one_round(strategist, rollout, number)
    tensors, values = strategist.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    _, other, _ = make_strategist(seed=9)
    other.load_state(tensors, values)
    for number in range(3, 6):
        first, second = one_round(strategist, rollout, number), one_round(other, rollout, number)
        for name, value in vars(first).items():
            assert torch.equal(value, getattr(second, name)) if isinstance(value, torch.Tensor) else value == getattr(second, name)
    for name, tensor in strategist.state()[0].items():
        assert torch.equal(tensor, other.state()[0][name]), name


def test_a_layer_that_is_not_there():
    with pytest.raises(ValueError, match="--layer 9"):
        make_strategist(layer=9)


def best_clusters(points, seed):
    """k-means++ starts, as a measurement deserves; the rewards use a cheaper start."""
    generator = seeded(seed)
    centres = points[torch.randint(len(points), (1,), generator=generator)]
    for _ in range(11):
        distance = torch.cdist(points, centres).min(1).values.square()
        centres = torch.cat((centres, points[torch.multinomial(distance, 1, generator=generator)]))
    return nearest(points, k_means(points, centres, 30)).tolist()


def test_clusters_of_embeddings_recover_the_true_strategies(policy):
    """Fifty steps of the heads on the base policy's responses, then 12 clusters of z_post on responses that they never
    saw: normalised mutual information with the true operators, beside that of the raw features."""
    model = lora.apply(policy.model)
    strategist = Strategist(model, Settings())
    problems = data.load("countdown", "train", 50 * 32 + 96)
    prompts, held_out, labels = policy.encode(problems), [], []
    for step in range(53):
        chosen = range(step * 32, step * 32 + 32)
        rollout = sample.generate(model, [prompts[i] for i in chosen], 8, 32, 1.0, policy.eos_ids, seeded(step))
        found = base_features(model, [prompts[i] for i in chosen], rollout, 1, 32, seeded(step))
        if step < 50:
            strategist.observe(found, torch.zeros(32, 8))
            strategist.update(8, seeded(step))
        else:
            held_out.append(found)
            labels += [problems[chosen[n // 8]].strategy_of(text) for n, text in enumerate(policy.decode(rollout))]
    found, legal = join(held_out), [n for n, label in enumerate(labels) if label]
    labels = [labels[n] for n in legal]
    with torch.no_grad():
        z_post = strategist.networks.embed(found.response, "response", momentum=True).flatten(0, 1)[legal]
    raw = found.response.flatten(0, 1)[legal]
    ours, theirs = ([mutual_information(best_clusters(points, seed), labels) for seed in range(3)] for points in (z_post, raw))
    print(f"mutual information with the true strategies: z_post {ours}, raw features {theirs}")
    assert min(ours) > 0.5 and max(theirs) < 0.3
