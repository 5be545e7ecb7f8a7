"""GRPO: numbers by hand, the fast scorer against the naive one, the loss against transformers and PEFT."""
import math
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import adapted, small_model
from peft import PeftModel

import grpo
import lora
from grpo import LossSettings, clipped_objective, group_advantages, k3, token_weights
from sample import generate

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13], [14]]
ADVANTAGES = torch.tensor([[1.0, -1.0, 0.5], [0.0, 0.0, 0.0], [-0.3, 0.7, -0.4], [2.0, -1.0, -1.0]])


@pytest.fixture
def model():
    return adapted()


@pytest.fixture
def rollout(model):
    return generate(model, PROMPTS, 3, 12, 0.9, (1, 2, 3), torch.Generator().manual_seed(4))


def gradient(model, rollout, settings, **options):
    """-> (metrics, the adapters' gradient as one vector)"""
    model.zero_grad()
    metrics = grpo.accumulate_gradient(model, PROMPTS, rollout, options.pop("advantages", ADVANTAGES), settings, **options)
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in lora.parameters(model).values()]
    return metrics, torch.cat([part.flatten() for part in parts])


def assert_same(ours, expected):
    """Equal up to fp32 rounding, measured on the whole vector."""
    assert (ours - expected).norm() < 1e-5 * expected.norm(), (ours - expected).norm() / expected.norm()


SETTINGS = LossSettings(temperature=0.9, kl=0.1, max_new_tokens=12, micro_batch=4)


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    expected = torch.tensor([[0.5, -0.5, -0.5, 0.5], [-0.25, -0.25, -0.25, 0.75]])
    torch.testing.assert_close(group_advantages(rewards, "none"), expected)
    deviations = torch.tensor([[math.sqrt(1 / 3)], [0.5]])              # sqrt(sum of squares / (4 - 1))
    torch.testing.assert_close(group_advantages(rewards, "std"), expected / (deviations + 1e-4))
    with pytest.raises(ValueError, match="expected std or none"):
        group_advantages(rewards, "max")


@pytest.mark.parametrize("normalise", ["std", "none"])
def test_advantages_stay_inside_their_group(normalise):
    rewards = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    advantages, order = group_advantages(rewards, normalise), torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.equal(group_advantages(rewards[order], normalise), advantages[order])
    torch.testing.assert_close(advantages.sum(1), torch.zeros(6), atol=1e-5, rtol=0)
    rewards[2] += 100
    torch.testing.assert_close(group_advantages(rewards, normalise), advantages, atol=1e-3, rtol=1e-3)
    for value in (0.0, 1.0, 1.3, 0.1, 1e-8):                            # no phantom advantage from a rounded mean
        assert (group_advantages(torch.full((3, 7), value), normalise) == 0).all()


def test_token_weights_by_hand():
    lengths = torch.tensor([1, 3, 4])
    torch.testing.assert_close(token_weights(lengths, 10, "token"), torch.full((3,), 1 / 8))
    torch.testing.assert_close(token_weights(lengths, 10, "sequence"), torch.tensor([1 / 3, 1 / 9, 1 / 12]))
    torch.testing.assert_close(token_weights(lengths, 10, "constant"), torch.full((3,), 1 / 30))
    for normalise in ("token", "sequence", "constant"):
        assert token_weights(torch.zeros(2, dtype=torch.long), 10, normalise).isfinite().all()
    with pytest.raises(ValueError, match="token, sequence or constant"):
        token_weights(lengths, 10, "word")


def test_clipping_and_kl_by_hand():
    logprobs, old = torch.log(torch.tensor([[1.5, 0.5, 1.1, 1.0]])), torch.zeros(1, 4)
    objective, clipped = clipped_objective(logprobs, old, torch.tensor([[2.0]]), 0.2, 0.3)
    torch.testing.assert_close(objective, torch.tensor([[2.6, 1.0, 2.2, 2.0]]))
    assert clipped.tolist() == [[True, False, False, False]]
    objective, clipped = clipped_objective(logprobs, old, torch.tensor([[-2.0]]), 0.2, 0.3)
    torch.testing.assert_close(objective, torch.tensor([[-3.0, -1.6, -2.2, -2.0]]))
    assert clipped.tolist() == [[False, True, False, False]]
    torch.testing.assert_close(k3(torch.tensor([0.0]), torch.tensor([math.log(2)])), torch.tensor([2 - math.log(2) - 1]))


def test_extreme_log_ratios_stay_finite():
    logprobs = torch.tensor([[-1e4, 0.0, -500.0]], requires_grad=True)
    old = torch.tensor([[0.0, -1e4, -500.0]])
    objective, _ = clipped_objective(logprobs, old, torch.tensor([[-1.0]]), 0.2, 0.2)
    (objective.sum() + k3(logprobs, old).sum()).backward()
    assert objective.isfinite().all() and logprobs.grad.isfinite().all()


def test_the_fast_scorer_equals_the_naive_one_in_values_loss_and_gradient(model, rollout, monkeypatch):
    mask = rollout.mask()
    fast = grpo.score(model, PROMPTS, rollout.ids, mask, 0.9)
    torch.testing.assert_close(fast, grpo.score_naive(model, PROMPTS, rollout.ids, mask, 0.9), atol=1e-4, rtol=1e-4)
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, SETTINGS)
    metrics, fast_gradient = gradient(model, rollout, SETTINGS, reference=reference)
    monkeypatch.setattr(grpo, "score", grpo.score_naive)
    naive_metrics, naive_gradient = gradient(model, rollout, SETTINGS, reference=reference)
    assert_same(fast_gradient, naive_gradient)
    assert metrics == pytest.approx(naive_metrics, abs=1e-5)


def test_chunks_of_the_vocabulary_change_nothing(model, rollout, monkeypatch):
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, SETTINGS)
    _, whole = gradient(model, rollout, SETTINGS, reference=reference)
    monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", 37 * 5)                 # five tokens at a time
    _, chunked = gradient(model, rollout, SETTINGS, reference=reference)
    assert_same(chunked, whole)


def test_the_hand_written_slope_of_a_log_probability_is_autograds():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(11, 6, generator=generator, dtype=torch.float64), torch.randn(37, 6, generator=generator, dtype=torch.float64)
    targets, weights = torch.arange(11) * 3, torch.randn(11, generator=generator)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    (grpo.TargetLogprobs.apply(ours, head, targets, 0.7) * weights).sum().backward()
    ((theirs @ head.T / 0.7).log_softmax(-1)[torch.arange(11), targets] * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)


def test_a_sure_token_keeps_its_slope_in_bf16():
    head = torch.eye(4).bfloat16()
    hidden = torch.tensor([[7.0, 0.0, 0.0, 0.0]]).bfloat16().requires_grad_()           # p = 0.997
    grpo.TargetLogprobs.apply(hidden, head, torch.tensor([0]), 1.0).sum().backward()
    expected = torch.eye(4)[0] - torch.tensor([7.0, 0.0, 0.0, 0.0]).softmax(0)
    torch.testing.assert_close(hidden.grad[0].float(), expected, atol=0, rtol=0.02)


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_gradient_is_the_same_for_every_micro_batch_size(model, rollout, normalise, kl):
    settings = replace(SETTINGS, normalise=normalise, kl=kl)
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, settings) if kl else None
    results = [gradient(model, rollout, replace(settings, micro_batch=size), reference=reference) for size in (1, 2, 3, 4)]
    for metrics, vector in results[1:]:
        assert_same(vector, results[0][1])
        assert metrics == pytest.approx(results[0][0], abs=1e-5)


def test_groups_without_signal_are_skipped_and_nothing_is_lost(model, rollout, monkeypatch):
    scored = []
    monkeypatch.setattr(grpo, "score", lambda m, prompts, *rest, score=grpo.score: scored.extend(prompts) or score(m, prompts, *rest))
    _, skipping = gradient(model, rollout, replace(SETTINGS, kl=0.0))
    assert PROMPTS[1] not in scored and len(scored) == 3
    _, whole = gradient(model, rollout, replace(SETTINGS, kl=1e-12), reference=rollout.logprobs)
    assert PROMPTS[1] in scored
    assert_same(skipping, whole)
    metrics, nothing = gradient(model, rollout, replace(SETTINGS, kl=0.0), advantages=torch.zeros(4, 3))
    assert (nothing == 0).all() and metrics["loss"] == 0


def test_the_loss_and_its_gradient_equal_transformers_with_peft(tmp_path, rollout, model):
    """A loop over responses and tokens, on transformers' model with PEFT's adapters: nothing of ours but the ids."""
    small_model().save_pretrained(tmp_path / "base")
    lora.save(model, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    old = rollout.logprobs + 0.3 * torch.randn(rollout.logprobs.shape, generator=torch.Generator().manual_seed(1))
    loss, count = 0.0, int(rollout.lengths.sum())
    for n in range(12):
        prompt, response = PROMPTS[n // 3], rollout.ids[n, :rollout.lengths[n]].tolist()
        advantage = float(ADVANTAGES[n // 3, n % 3])
        logits = theirs(torch.tensor([prompt + response])).logits[0] / 0.9
        with theirs.disable_adapter(), torch.no_grad():
            reference_logits = theirs(torch.tensor([prompt + response])).logits[0] / 0.9
        for t, token in enumerate(response):
            where = len(prompt) + t - 1
            logp = logits[where, token] - logits[where].logsumexp(0)
            ref = reference_logits[where, token] - reference_logits[where].logsumexp(0)
            ratio = torch.exp(logp - old[n, t])
            surrogate = min(ratio * advantage, max(0.8, min(1.25, ratio)) * advantage)
            loss = loss + (0.1 * (torch.exp(ref - logp) - (ref - logp) - 1) - surrogate) / count
    loss.backward()
    settings = replace(SETTINGS, clip_high=0.25, micro_batch=2)
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, settings)
    metrics, ours = gradient(model, rollout, settings, reference=reference, old=old)
    expected = {name.replace(".default", ""): parameter.grad for name, parameter in theirs.named_parameters() if "lora_" in name}
    expected = torch.cat([expected[name].flatten() for name in lora.parameters(model)])
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5) and metrics["clip_share"] > 0.05
    assert_same(ours, expected)


def test_an_unmoved_policy_has_ratio_one_and_clips_nothing(model, rollout):
    recomputed = grpo.score(model, PROMPTS, rollout.ids, rollout.mask(), 0.9)
    assert (recomputed - rollout.logprobs).abs().max() < 1e-4
    metrics, from_sampler = gradient(model, rollout, replace(SETTINGS, kl=0.0), old=rollout.logprobs)
    assert metrics["clip_share"] == 0
    _, single = gradient(model, rollout, replace(SETTINGS, kl=0.0))
    assert_same(from_sampler, single)


def test_a_fresh_adapter_has_kl_exactly_zero():
    model = lora.apply(small_model(), 4)
    rollout = generate(model, PROMPTS, 3, 12, 0.9, (1,), torch.Generator().manual_seed(0))
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, SETTINGS)
    metrics, _ = gradient(model, rollout, SETTINGS, reference=reference)
    assert metrics["kl"] == 0.0


def test_a_step_moves_b_and_leaves_the_base_alone(rollout):
    model = lora.apply(small_model(), 4)
    base = {name: p.clone() for name, p in model.named_parameters() if "lora_" not in name}
    optimizer = torch.optim.AdamW(lora.parameters(model).values(), lr=1e-3)
    gradient(model, rollout, replace(SETTINGS, kl=0.0))
    optimizer.step()
    assert all((layer.lora_B != 0).any() for layer in lora.layers(model).values())
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)


def test_bf16_scores_in_fp32(rollout):
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    _, vector = gradient(model, rollout, replace(SETTINGS, kl=0.0))
    _, expected = gradient(adapted(), rollout, replace(SETTINGS, kl=0.0))
    assert vector.dtype == torch.float32 and torch.cosine_similarity(vector, expected, dim=0) > 0.95
    hidden, head = torch.randn(9, 36).bfloat16(), model.head
    logprobs = grpo.TargetLogprobs.apply(hidden, head, torch.arange(9), 1.0)
    expected = (hidden @ head.T).double().log_softmax(-1)[torch.arange(9), torch.arange(9)]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_empty_responses_give_no_nan(model, rollout, normalise):
    rollout.lengths[:] = 0
    _, vector = gradient(model, rollout, replace(SETTINGS, kl=0.0, normalise=normalise))
    assert (vector == 0).all()
    rollout.lengths[0] = 2
    metrics, vector = gradient(model, rollout, replace(SETTINGS, kl=0.0, normalise=normalise))
    assert vector.isfinite().all() and (vector != 0).any() and math.isfinite(metrics["loss"])


def test_recomputing_layers_changes_no_gradient(model, rollout):
    reference = grpo.reference_logprobs(model, PROMPTS, rollout, SETTINGS)
    metrics, expected = gradient(model, rollout, SETTINGS, reference=reference)
    model.recompute = True
    again, ours = gradient(model, rollout, SETTINGS, reference=reference)
    assert metrics == again and torch.equal(ours, expected)
