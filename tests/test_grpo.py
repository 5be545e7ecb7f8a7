"""GRPO: numbers by hand, `score` against whole sequences, the gradient against PEFT's."""
import math

import pytest
import torch
import transformers
from peft import PeftModel
from torch import Tensor

import grpo
import lora
from grpo import group_advantages, k3, policy_loss
from model import Transformer
from sample import Rollout, generate
from support.config import Config
from tests.conftest import adapted, small_model

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13], [14]]
ADVANTAGES = torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [-0.3, 0.7, -0.4], [2.0, -1.0, -1.0]])


def settings(**changes) -> Config:
    return Config(**{"temperature": 0.9, "kl": 0.1, "micro_batch": 4, **changes})


@pytest.fixture
def model() -> Transformer:
    return adapted()


@pytest.fixture
def rollout(model) -> Rollout:
    return generate(model, PROMPTS, 3, 12, 0.9, (1, 2, 3), torch.Generator().manual_seed(4))


def score_naive(model: Transformer, prompts: list[list[int]], ids: Tensor, mask: Tensor,
                temperature: float) -> Tensor:
    """grpo.score, from one whole sequence at a time: no padding, no prefix, every logit kept."""
    samples = len(ids) // len(prompts)
    rows = []
    for n, response in enumerate(ids):
        prompt = prompts[n // samples]
        sequence = torch.tensor([prompt + response.tolist()])
        logits = model(sequence)[0, len(prompt) - 1:-1]  # (T, V)
        logprobs = (logits.float() / temperature).log_softmax(-1)
        rows.append(logprobs.gather(1, response[:, None])[:, 0])
    return torch.stack(rows) * mask


def gradient(model, rollout, config, advantages=ADVANTAGES, prompts=PROMPTS, **options):
    """-> (metrics, the adapters' gradient as one vector)."""
    model.zero_grad()
    metrics = grpo.accumulate_gradient(model, prompts, rollout, advantages, config, **options)
    parts = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
             for parameter in lora.parameters(model).values()]
    return metrics, torch.cat([part.flatten() for part in parts])


def assert_same(found, expected, tolerance=1e-5):
    """Equal up to rounding in fp32, measured on the whole vector."""
    assert (found - expected).norm() < tolerance * expected.norm()


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    expected = torch.tensor([[0.5, -0.5, -0.5, 0.5], [-0.25, -0.25, -0.25, 0.75]])
    torch.testing.assert_close(group_advantages(rewards, "none"), expected)
    deviations = torch.tensor([[math.sqrt(1 / 3)], [0.5]])  # sqrt(sum of squares / (4 - 1))
    torch.testing.assert_close(group_advantages(rewards, "std"), expected / (deviations + 1e-4))


@pytest.mark.parametrize("normalise", ["std", "none"])
def test_advantages_stay_inside_their_group(normalise):
    rewards = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    advantages = group_advantages(rewards, normalise)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.equal(group_advantages(rewards[order], normalise), advantages[order])
    torch.testing.assert_close(advantages.sum(1), torch.zeros(6), atol=1e-5, rtol=0)
    rewards[2] += 100
    torch.testing.assert_close(group_advantages(rewards, normalise), advantages,
                               atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("normalise", ["std", "none"])
@pytest.mark.parametrize("value", [0.0, 1.0, 1.3, 0.1, 1e-8])
def test_equal_rewards_give_no_phantom_advantage(value, normalise):
    assert (group_advantages(torch.full((3, 7), value), normalise) == 0).all()


@pytest.mark.parametrize("advantage, clipped_ratios", [(2.0, [1.21, 1.5]), (-2.0, [0.79, 0.5])])
def test_the_clip_stops_the_gradient_beyond_1_plus_minus_0_2(advantage, clipped_ratios):
    ratios = [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.5]
    logprobs = torch.tensor([ratios]).log().requires_grad_()
    old = torch.zeros(1, 7)
    weights = torch.full((1, 7), 0.1)
    loss, clipped = policy_loss(logprobs, old, old, torch.tensor([[advantage]]), weights, kl=0.0)
    loss.backward()
    for ratio, is_clipped, slope in zip(ratios, clipped[0].tolist(), logprobs.grad[0].tolist()):
        assert is_clipped == (ratio in clipped_ratios)
        expected = 0.0 if is_clipped else -0.1 * advantage * ratio
        assert slope == pytest.approx(expected, abs=1e-6), ratio
    # The worse of the two: a ratio that has gone too far the wrong way still counts in full.
    objectives = {2.0: [1.0, 1.58, 1.62, 2.0, 2.38, 2.4, 2.4],
                  -2.0: [-1.6, -1.6, -1.62, -2.0, -2.38, -2.42, -3.0]}
    assert loss.item() == pytest.approx(-0.1 * sum(objectives[advantage]), abs=1e-6)


def test_k3_by_hand():
    found = k3(torch.tensor([0.0, 0.0, -1.0]), torch.tensor([math.log(2), 0.0, -3.0]))
    expected = torch.tensor([2 - math.log(2) - 1, 0.0, math.exp(-2) + 2 - 1])
    torch.testing.assert_close(found, expected)


def test_the_gradients_of_k3_and_k2_are_those_of_the_two_kl_divergences():
    """Expected over exact probabilities of four tokens, in fp64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(4, generator=generator, dtype=torch.float64).log_softmax(0)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]
    for penalty, forward in ((grpo.k3, True), (grpo.k2, False)):
        logprobs = logits.log_softmax(0)
        estimate = (logprobs.exp().detach() * penalty(logprobs, reference)).sum()
        logprobs = logits.log_softmax(0)
        divergences = {True: (reference.exp() * (reference - logprobs)).sum(),
                       False: (logprobs.exp() * (logprobs - reference)).sum()}
        found, right = gradient(estimate), gradient(divergences[forward])
        torch.testing.assert_close(found, right)
        assert not torch.allclose(found, gradient(divergences[not forward]), rtol=0.01)


def test_the_kl_weight_falls_to_a_share_of_itself():
    config = Config(kl=0.1, kl_decay=0.01, steps=10)
    assert grpo.kl_at(0, config) == pytest.approx(0.1)
    assert grpo.kl_at(5, config) == pytest.approx(0.01)
    assert grpo.kl_at(10, config) == pytest.approx(0.001)
    assert grpo.kl_at(7, Config(kl=0.1, steps=10)) == 0.1


def test_the_form_of_the_penalty_is_the_one_asked_for(model, rollout):
    reference = rollout.logprobs - 0.5
    gradients = []
    for form in ("k3", "k2"):
        model.zero_grad()
        config = Config(temperature=0.9, kl=0.3, kl_form=form)
        samples = len(rollout.ids) // len(PROMPTS)
        advantages = torch.zeros(len(PROMPTS), samples)
        grpo.accumulate_gradient(model, PROMPTS, rollout, advantages, config, reference)
        gradients.append(torch.cat([p.grad.flatten() for p in lora.parameters(model).values()]))
    # d = -0.5: the slopes are 1 - exp(d) and -d.
    ratio = (gradients[1].norm() / gradients[0].norm()).item()
    assert ratio == pytest.approx(0.5 / (1 - math.exp(-0.5)), rel=0.05)


def test_the_loss_is_kl_times_k3_minus_the_objective():
    logprobs = torch.tensor([[0.0, -1.0]]).requires_grad_()
    old = logprobs.detach()
    reference = torch.tensor([[math.log(2), -3.0]])
    weights = torch.tensor([[0.25, 0.75]])
    loss, _ = policy_loss(logprobs, old, reference, torch.tensor([[0.5]]), weights, kl=0.1)
    divergences = (2 - math.log(2) - 1, math.exp(-2) + 2 - 1)
    expected = 0.25 * (0.1 * divergences[0] - 0.5) + 0.75 * (0.1 * divergences[1] - 0.5)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    loss.backward()
    # d k3 / d logp = 1 - exp(ref - logp); d ratio / d logp = 1 while nothing has moved.
    slopes = [0.25 * (0.1 * (1 - 2) - 0.5), 0.75 * (0.1 * (1 - math.exp(-2)) - 0.5)]
    torch.testing.assert_close(logprobs.grad, torch.tensor([slopes]))


def test_extreme_log_ratios_are_cut_off_at_20():
    logprobs = torch.tensor([[-1e4, 0.0, -500.0]], requires_grad=True)
    old = torch.tensor([[0.0, -1e4, -500.0]])
    loss, _ = policy_loss(logprobs, old, old, torch.tensor([[-1.0]]), torch.ones(1, 3), kl=1.0)
    loss.backward()
    # k3 minus the objective: the log ratios count as -20, 20 and 0, and only the last has a slope.
    divergences = (math.exp(20) - 20 - 1, math.exp(-20) + 20 - 1, 0.0)
    objectives = (-0.8, -math.exp(20), -1.0)
    assert loss.item() == pytest.approx(sum(divergences) - sum(objectives), rel=1e-6)
    assert logprobs.grad.tolist() == [[0.0, 0.0, 1.0]]


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_score_equals_whole_sequences_in_values_loss_and_gradient(family, monkeypatch):
    model = adapted(family)
    generator = torch.Generator().manual_seed(4)
    rollout = generate(model, PROMPTS, 3, 12, 0.9, (1, 2, 3), generator)
    mask = rollout.mask()
    scored = grpo.score(model, PROMPTS, rollout.ids, mask, 0.9)
    naive = score_naive(model, PROMPTS, rollout.ids, mask, 0.9)
    torch.testing.assert_close(scored, naive, atol=1e-4, rtol=1e-4)
    assert (scored[~mask] == 0).all()
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, settings())
    with lora.disabled(model):
        naive_reference = score_naive(model, PROMPTS, rollout.ids, mask, 0.9)
    torch.testing.assert_close(reference, naive_reference, atol=1e-4, rtol=1e-4)
    metrics, vector = gradient(model, rollout, settings(), reference=reference)
    monkeypatch.setattr(grpo, "score", score_naive)
    naive_metrics, naive_vector = gradient(model, rollout, settings(), reference=reference)
    assert_same(vector, naive_vector)
    assert metrics == pytest.approx(naive_metrics, abs=1e-5)


def test_prompts_of_equal_length_need_no_mask_and_score_the_same(model):
    prompts = [[3, 4, 5], [6, 7, 8]]
    rollout = generate(model, prompts, 3, 9, 1.0, (1, 2), torch.Generator().manual_seed(4))
    scored = grpo.score(model, prompts, rollout.ids, rollout.mask(), 1.0)
    naive = score_naive(model, prompts, rollout.ids, rollout.mask(), 1.0)
    torch.testing.assert_close(scored, naive, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_gradient_is_the_same_for_every_micro_batch_size(model, rollout, kl):
    reference = None
    if kl:
        reference = grpo.reference_logprobs(model, PROMPTS, rollout, settings())
    expected_metrics, expected = gradient(model, rollout, settings(kl=kl), reference=reference)
    for size in (1, 2, 3):
        config = settings(kl=kl, micro_batch=size)
        metrics, vector = gradient(model, rollout, config, reference=reference)
        assert_same(vector, expected)
        assert metrics == pytest.approx(expected_metrics, abs=1e-5)


def test_the_reference_is_the_same_for_every_micro_batch_size(model, rollout):
    expected = grpo.reference_logprobs(model, PROMPTS, rollout, settings())
    assert not expected.requires_grad
    for size in (1, 3):
        found = grpo.reference_logprobs(model, PROMPTS, rollout, settings(micro_batch=size))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_every_token_of_the_batch_weighs_the_same(model, rollout):
    """With a ratio of one, the loss is minus the mean over tokens of their response's advantage."""
    metrics, _ = gradient(model, rollout, settings(kl=0.0))
    lengths = rollout.lengths.tolist()
    assert len(set(lengths)) > 2
    tokens = zip(ADVANTAGES.flatten().tolist(), lengths)
    expected = -sum(advantage * length for advantage, length in tokens) / sum(lengths)
    assert metrics["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("weight", [0.1, 1.0])
def test_the_kl_metric_is_the_mean_of_k3_over_all_tokens(model, rollout, weight):
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, settings())
    config = settings(kl=weight, micro_batch=3)
    metrics, _ = gradient(model, rollout, config, reference=reference)
    mask = rollout.mask()
    with torch.no_grad():
        difference = reference - score_naive(model, PROMPTS, rollout.ids, mask, 0.9)
    expected = (difference.exp() - difference - 1)[mask].mean().item()
    assert expected > 0.01
    assert metrics["kl"] == pytest.approx(expected, rel=1e-3)
    without, _ = gradient(model, rollout, settings(kl=0.0))
    assert metrics["loss"] == pytest.approx(without["loss"] + weight * expected, rel=1e-3)


def test_groups_without_signal_are_skipped_and_nothing_is_lost(model, rollout, monkeypatch):
    scored = []
    original = grpo.score

    def record(model, prompts, *rest):
        scored.extend(prompts)
        return original(model, prompts, *rest)
    monkeypatch.setattr(grpo, "score", record)
    _, skipping = gradient(model, rollout, settings(kl=0.0))
    assert scored == [PROMPTS[0], PROMPTS[2], PROMPTS[3]]
    scored.clear()
    _, everything = gradient(model, rollout, settings(kl=1e-12), reference=rollout.logprobs)
    assert scored == PROMPTS
    assert_same(skipping, everything)
    metrics, nothing = gradient(model, rollout, settings(kl=0.0), torch.zeros(4, 3))
    assert (nothing == 0).all()
    assert metrics["loss"] == 0


def test_the_loss_and_its_gradient_equal_transformers_with_peft(tmp_path, rollout, model):
    """A loop over responses and tokens, on transformers' model with PEFT's adapters."""
    small_model().save_pretrained(tmp_path / "base")
    lora.save(model, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    noise = torch.randn(rollout.logprobs.shape, generator=torch.Generator().manual_seed(1))
    old = rollout.logprobs + 0.3 * noise
    loss, clipped, count = 0.0, 0, int(rollout.lengths.sum())
    for n in range(12):
        prompt, response = PROMPTS[n // 3], rollout.ids[n, :rollout.lengths[n]].tolist()
        advantage = float(ADVANTAGES[n // 3, n % 3])
        sequence = torch.tensor([prompt + response])
        logits = theirs(sequence).logits[0] / 0.9
        with theirs.disable_adapter(), torch.no_grad():
            reference_logits = theirs(sequence).logits[0] / 0.9
        for t, token in enumerate(response):
            slot = len(prompt) + t - 1
            logp = logits[slot, token] - logits[slot].logsumexp(0)
            ref = reference_logits[slot, token] - reference_logits[slot].logsumexp(0)
            ratio = torch.exp(logp - old[n, t])
            surrogate = min(ratio * advantage, max(0.8, min(1.2, ratio)) * advantage)
            clipped += int(surrogate < ratio * advantage)
            divergence = torch.exp(ref - logp) - (ref - logp) - 1
            loss = loss + (0.1 * divergence - surrogate) / count
    loss.backward()
    config = settings(micro_batch=2)
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, config)
    metrics, found = gradient(model, rollout, config, reference=reference, old=old)
    gradients = {name.replace(".default", ""): parameter.grad
                 for name, parameter in theirs.named_parameters() if "lora_" in name}
    expected = torch.cat([gradients[name].flatten() for name in lora.parameters(model)])
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["clip_share"] == pytest.approx(clipped / count)
    assert clipped > 3
    assert_same(found, expected)


def test_mismatch_is_how_far_scored_tokens_are_from_what_was_sampled(model, rollout):
    """A mean over the tokens that are scored: without KL, groups of zero advantage are not."""
    advantages = ADVANTAGES.clone()
    advantages[1] = 0.0
    metrics, _ = gradient(model, rollout, settings(kl=0.0), advantages)
    assert 0 <= metrics["mismatch"] < 1e-5
    rollout.logprobs += 0.5 * rollout.mask()  # as if another policy had sampled
    for size in (1, 4):
        metrics, _ = gradient(model, rollout, settings(kl=0.0, micro_batch=size), advantages)
        assert metrics["mismatch"] == pytest.approx(0.5, abs=1e-4)
    rollout.logprobs[3:6] += 7.0 * rollout.mask()[3:6]  # that group
    metrics, _ = gradient(model, rollout, settings(kl=0.0), advantages)
    assert metrics["mismatch"] == pytest.approx(0.5, abs=1e-4)
    metrics, _ = gradient(model, rollout, settings(kl=0.1), advantages)
    assert metrics["mismatch"] > 1


def test_an_unmoved_policy_has_ratio_one_and_clips_nothing(model, rollout):
    recomputed = grpo.score(model, PROMPTS, rollout.ids, rollout.mask(), 0.9)
    assert (recomputed - rollout.logprobs).abs().max() < 1e-4
    metrics, from_sampler = gradient(model, rollout, settings(kl=0.0), old=rollout.logprobs)
    assert metrics["clip_share"] == 0
    _, single = gradient(model, rollout, settings(kl=0.0))
    assert_same(from_sampler, single)


def test_a_fresh_adapter_has_kl_exactly_zero():
    model = lora.apply(small_model(), 4)
    rollout = generate(model, PROMPTS, 3, 12, 0.9, (1,), torch.Generator().manual_seed(0))
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, settings())
    metrics, _ = gradient(model, rollout, settings(), reference=reference)
    assert metrics["kl"] == 0.0


def test_the_end_token_is_trained(model):
    """Here every token ends the response, so whatever is learned is learned about end tokens."""
    rollout = generate(model, PROMPTS, 3, 12, 0.9, tuple(range(37)), torch.Generator())
    assert rollout.finished.all()
    assert (rollout.lengths == 1).all()
    metrics, found = gradient(model, rollout, settings(kl=0.0))
    model.zero_grad()
    logprobs = score_naive(model, PROMPTS, rollout.ids, torch.ones(12, 1), 0.9)
    (-(logprobs[:, 0] * ADVANTAGES.flatten()).sum() / 12).backward()
    parameters = lora.parameters(model).values()
    expected = torch.cat([parameter.grad.flatten() for parameter in parameters])
    assert expected.norm() > 1e-3
    assert_same(found, expected)
    assert metrics["loss"] == pytest.approx(-ADVANTAGES.sum().item() / 12, abs=1e-6)


def test_rewarded_responses_become_likelier_up_to_their_end_token(model, rollout):
    before = score_naive(model, PROMPTS, rollout.ids, rollout.mask(), 0.9).detach()
    rewarded = 9  # the first response to the last problem
    assert rollout.finished[rewarded]
    advantages = torch.zeros(4, 3)
    advantages[3, 0] = 1.0
    optimizer = torch.optim.SGD(lora.parameters(model).values(), lr=0.1)
    gradient(model, rollout, settings(kl=0.0), advantages)
    optimizer.step()
    after = score_naive(model, PROMPTS, rollout.ids, rollout.mask(), 0.9).detach()
    assert after[rewarded].sum() > before[rewarded].sum() + 0.01
    last = int(rollout.lengths[rewarded]) - 1
    assert after[rewarded, last] > before[rewarded, last]


def test_a_step_moves_b_and_leaves_the_base_alone():
    """Sampling, the reference, the gradient and the update: the base weights keep every bit."""
    model = lora.apply(small_model(), 4)
    base = {name: parameter.clone() for name, parameter in model.named_parameters()
            if "lora_" not in name}
    rollout = generate(model, PROMPTS, 3, 12, 0.9, (1, 2, 3), torch.Generator().manual_seed(4))
    optimizer = torch.optim.AdamW(lora.parameters(model).values(), lr=1e-3)
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, settings())
    gradient(model, rollout, settings(), reference=reference)
    optimizer.step()
    with lora.merged(model):
        model(torch.tensor([[1, 2, 3]]))
    for name, layer in lora.layers(model).items():
        assert (layer.lora_B != 0).any(), name
    for name, parameter in base.items():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_a_bf16_base_scores_in_fp32(rollout):
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    scored = grpo.score(model, PROMPTS, rollout.ids, rollout.mask(), 0.9)
    assert scored.dtype == torch.float32
    _, vector = gradient(model, rollout, settings(kl=0.0))
    _, expected = gradient(adapted(), rollout, settings(kl=0.0))
    assert vector.dtype == torch.float32
    assert torch.cosine_similarity(vector, expected, dim=0) > 0.95


def test_empty_responses_give_no_nan(model, rollout):
    rollout.lengths[:] = 0
    metrics, vector = gradient(model, rollout, settings(kl=0.0))
    assert (vector == 0).all()
    assert metrics == {"loss": 0.0, "kl": 0.0, "clip_share": 0.0, "mismatch": 0.0}
    rollout.lengths[0] = 2  # two tokens in the whole batch, with an advantage of one
    metrics, vector = gradient(model, rollout, settings(kl=0.0))
    assert metrics["loss"] == pytest.approx(-1.0)
    mask = torch.zeros(12, 2)
    mask[0] = 1
    model.zero_grad()
    (-score_naive(model, PROMPTS, rollout.ids[:, :2], mask, 0.9).sum() / 2).backward()
    parameters = lora.parameters(model).values()
    assert_same(vector, torch.cat([parameter.grad.flatten() for parameter in parameters]))


def test_recomputing_layers_changes_no_gradient(model, rollout):
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, settings())
    metrics, expected = gradient(model, rollout, settings(), reference=reference)
    model.recompute = True
    again, found = gradient(model, rollout, settings(), reference=reference)
    assert metrics == again
    assert torch.equal(found, expected)


def test_gradients_add_up_over_calls(model, rollout):
    _, once = gradient(model, rollout, settings(kl=0.0))
    grpo.accumulate_gradient(model, PROMPTS, rollout, ADVANTAGES, settings(kl=0.0))
    parameters = lora.parameters(model).values()
    twice = torch.cat([parameter.grad.flatten() for parameter in parameters])
    assert_same(twice, 2 * once)
