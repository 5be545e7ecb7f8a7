"""The sampler: exactly the distribution that training scores, whatever the batch looks like."""
from contextlib import nullcontext

import pytest
import torch
from conftest import adapted, small_model

import lora
from grpo import score_naive
from sample import draw, generate, pad_left

PROMPTS = [[3, 4, 5, 6], [7, 8], [9, 10, 11]]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_same_seed_same_tokens():
    model = adapted()
    first, second, other = (generate(model, PROMPTS, 4, 12, 1.0, (1,), seeded(s)) for s in (5, 5, 6))
    assert torch.equal(first.ids, second.ids) and torch.equal(first.logprobs, second.logprobs)
    assert not torch.equal(first.ids[:, 0], other.ids[:, 0])


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["three prompts", "one prompt"])
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_are_those_of_the_whole_sequence_at_this_temperature(temperature, family, prompts):
    model = adapted(family)
    rollout = generate(model, prompts, 5, 15, temperature, (1, 2), seeded())
    mask = rollout.mask()
    torch.testing.assert_close(rollout.logprobs, score_naive(model, prompts, rollout.ids, mask, temperature), atol=1e-4, rtol=1e-4)
    assert (rollout.logprobs[~mask] == 0).all() and (rollout.ids[~mask] == 0).all()
    assert len(prompts) == 1 or (rollout.lengths < 15).any()


def test_sampling_without_adapters_is_sampling_from_the_base():
    model = adapted()
    with lora.disabled(model):
        rollout = generate(model, PROMPTS, 2, 6, 1.0, (), seeded())
        torch.testing.assert_close(rollout.logprobs, score_naive(model, PROMPTS, rollout.ids, rollout.mask(), 1.0), atol=1e-4, rtol=1e-4)


def test_greedy_equals_argmax_of_the_uncached_forward():
    model = adapted()
    rollout = generate(model, PROMPTS, 2, 10, 0.0, (), seeded())
    for n in range(6):
        ids = list(PROMPTS[n // 2])
        for t in range(10):
            token = int(model(torch.tensor([ids]))[0, -1].argmax())
            assert int(rollout.ids[n, t]) == token
            ids.append(token)
    assert (rollout.logprobs == 0).all()


def test_a_response_does_not_depend_on_when_its_neighbours_finish():
    model = adapted()
    forever = generate(model, PROMPTS, 6, 14, 1.0, (), seeded())
    assert not forever.finished.any() and (forever.lengths == 14).all()
    ending = generate(model, PROMPTS, 6, 14, 1.0, (2, 7, 30), seeded())
    for n in range(18):
        length = int(ending.lengths[n])
        assert torch.equal(ending.ids[n, :length], forever.ids[n, :length])
        ends = [t for t in range(14) if int(forever.ids[n, t]) in (2, 7, 30)]
        assert length == (ends[0] + 1 if ends else 14) and bool(ending.finished[n]) == bool(ends)
        assert (ending.ids[n, length:] == 0).all()
    assert ending.finished.any() and not ending.finished.all()


def test_the_mask_comes_from_lengths_not_from_pad_ids():
    rollout = generate(adapted(), PROMPTS, 8, 20, 1.5, (1,), seeded())
    assert torch.equal(rollout.mask().sum(1), rollout.lengths)
    assert ((rollout.ids == 0) & rollout.mask()).any()                  # id 0 does occur inside responses
    ended = rollout.ids.gather(1, rollout.lengths[:, None] - 1)[rollout.finished]
    assert (ended == 1).all()                                           # the end token belongs to the response


def test_draws_follow_the_distribution():
    logits, n = torch.tensor([2.0, -1.0, 0.5, -torch.inf, 0.0]), 200_000
    tokens, logprobs = draw(logits.expand(n, 5), 0.8, torch.rand(n, generator=seeded(), dtype=torch.float64))
    probabilities = (logits / 0.8).softmax(0)
    frequencies = tokens.bincount(minlength=5) / n
    assert frequencies[3] == 0
    assert ((frequencies - probabilities).abs() < 4 * (probabilities * (1 - probabilities) / n).sqrt() + 1e-9).all()
    torch.testing.assert_close(logprobs, probabilities.log()[tokens])


def test_the_edges_of_the_unit_interval_give_possible_tokens():
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, [4, 500]] = torch.tensor([0.0, 1.0])
    tokens, _ = draw(logits, 1.0, torch.tensor([0.0, 1 - 2 ** -53], dtype=torch.float64))
    assert tokens.tolist() == [4, 500]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("model", [adapted(), adapted("qwen3", targets=("v_proj",)), small_model("llama", attention_bias=True, mlp_bias=True)],
                         ids=["adapters", "one adapter", "no adapters"])
def test_base_weights_survive_sampling_bit_for_bit(model, enabled):
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with nullcontext() if enabled else lora.disabled(model):
        generate(model, PROMPTS, 2, 5, 1.0, (1,), seeded())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_pad_left():
    ids, start = pad_left([[5], [6, 7]], torch.device("cpu"))
    assert ids.tolist() == [[0, 5], [6, 7]] and start.tolist() == [1, 0]
    assert pad_left([[5, 6], [6, 7]], torch.device("cpu"))[1] is None


@pytest.mark.parametrize("change, word", [
    ({"prompts": []}, "no prompt"), ({"prompts": [[1], []]}, "empty"), ({"samples": 0}, "samples"),
    ({"max_new_tokens": 0}, "max_new_tokens"), ({"temperature": -1.0}, "temperature"),
    ({"temperature": float("nan")}, "temperature"), ({"prompts": [[1] * 60]}, "context of 64"), ({"prompts": [[37]]}, "token 37")])
def test_impossible_requests(change, word):
    request = dict(prompts=PROMPTS, samples=2, max_new_tokens=5, temperature=1.0, eos_ids=(1,), generator=seeded()) | change
    with pytest.raises(ValueError, match=word):
        generate(small_model(), **request)


def test_logits_that_are_not_finite_are_named():
    with pytest.raises(FloatingPointError, match="not finite"):
        draw(torch.full((2, 5), torch.nan), 1.0, torch.rand(2))
