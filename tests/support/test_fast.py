"""The fast modules against the textbook ones, which are the reference: values and gradients.

FAST is walked through, not spelled out, so a twin that is added or removed needs no change here.
"""
import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
import lora
import sample
from model import MLP, Attention, RMSNorm, Transformer
from sample import generate
from support import decoder, fast
from support.config import Config
from support.fast import FAST, accelerate
from tests.conftest import adapted, small_model
from tests.test_grpo import score_naive

FAMILIES = ("qwen2", "qwen3", "llama")
PROMPTS = {"padded": [[3, 4, 5, 6], [7, 8], [9, 10, 11]], "even": [[3, 4, 5], [7, 8, 9]]}
IDS = torch.randint(37, (3, 11), generator=torch.Generator().manual_seed(1))
START = torch.tensor([0, 3, 1])


def cast_base(model, dtype):
    """The base weights in this dtype; adapters stay in fp32."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
    return model


def make_pair(family="qwen2"):
    """-> (the textbook model, the same accelerated)."""
    textbook = adapted(family)
    return textbook, accelerate(copy.deepcopy(textbook))


def swap_one(model, textbook_class):
    """Only the modules of this class become their fast twins -> how many there were."""
    modules = [module for module in model.modules() if type(module) is textbook_class]
    for module in modules:
        module.__class__ = FAST[textbook_class]
    return len(modules)


def random_weights(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def logits_and_gradients(model):
    """-> (logits (3, 11, V), the gradient of every parameter that learns, by name)."""
    model.zero_grad()
    logits = model(IDS, START)
    (logits.float() * random_weights(*logits.shape)).sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()
                             if parameter.requires_grad}


def scores_and_gradients(model, prompts, rollout, temperature):
    """-> (log-probabilities (N, T), the gradient of every adapter, by name)."""
    model.zero_grad()
    scores = grpo.score(model, prompts, rollout.ids, rollout.mask(), temperature)
    (scores * random_weights(*scores.shape)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in lora.parameters(model).items()}
    return scores.detach(), gradients


def assert_same_gradients(found, expected, tolerance=1e-4):
    """Every tensor by itself, up to rounding in fp32, which a random model makes larger."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert found[name].dtype == gradient.dtype
        assert (found[name] - gradient).norm() < tolerance * gradient.norm(), name


def relative_error(found, truth) -> float:
    """The distance of two tensors, or of two dictionaries of tensors taken together."""
    if isinstance(found, dict):
        found = torch.cat([tensor.flatten() for tensor in found.values()])
        truth = torch.cat([tensor.flatten() for tensor in truth.values()])
    return ((found - truth).double().norm() / truth.double().norm()).item()


def gentle_model(family, seed):
    """An adapted model on a bf16 base; its weights are small, so that rounding does not explode."""
    model = small_model(family, seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            parameter.data *= 0.5
    generator = torch.Generator().manual_seed(seed)
    for parameter in lora.parameters(lora.apply(model, 4)).values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return cast_base(model, torch.bfloat16)


def assert_as_exact_in_bf16(family, make_fast, run):
    """In bf16 both models err: the fast one may not err more, measured on several of them.

    The truth is the model with the same rounded weights, computed in fp32. run(model) gives a
    tensor of values and a dictionary of gradients.
    """
    squares = torch.zeros(2, 3)  # of values and gradients: errors of both models, their distance
    for seed in range(4):
        textbook = gentle_model(family, seed)
        results = run(textbook)
        fast_results = run(make_fast(copy.deepcopy(textbook)))
        truths = run(cast_base(textbook, torch.float32))
        assert fast_results[0].dtype == results[0].dtype
        assert all(gradient.dtype == torch.float32 for gradient in fast_results[1].values())
        for row, (found, expected, truth) in enumerate(zip(fast_results, results, truths)):
            squares[row] += torch.tensor([relative_error(expected, truth) ** 2,
                                          relative_error(found, truth) ** 2,
                                          relative_error(found, expected) ** 2])
    for textbook_error, fast_error, distance in (squares / 4).sqrt().tolist():
        assert textbook_error < 0.1
        assert fast_error < 1.5 * textbook_error
        assert distance < 1.5 * textbook_error


@pytest.mark.parametrize("family", FAMILIES)
def test_the_accelerated_model_has_the_textbook_logits_and_gradients(family):
    textbook, accelerated = make_pair(family)
    logits, gradients = logits_and_gradients(textbook)
    fast_logits, fast_gradients = logits_and_gradients(accelerated)
    torch.testing.assert_close(fast_logits, logits, atol=1e-4, rtol=1e-4)
    assert gradients.keys() == {name for name, _ in textbook.named_parameters() if "lora_" in name}
    assert_same_gradients(fast_gradients, gradients)


@pytest.mark.parametrize("lengths", PROMPTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_accelerated_model_has_the_textbook_scores_and_gradients(family, lengths):
    textbook, accelerated = make_pair(family)
    prompts = PROMPTS[lengths]
    rollout = generate(textbook, prompts, 3, 9, 0.8, (1, 2, 3), torch.Generator().manual_seed(4))
    scores, gradients = scores_and_gradients(textbook, prompts, rollout, 0.8)
    fast_scores, fast_gradients = scores_and_gradients(accelerated, prompts, rollout, 0.8)
    torch.testing.assert_close(fast_scores, scores, atol=1e-4, rtol=1e-4)
    assert_same_gradients(fast_gradients, gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_bf16_base_the_accelerated_model_is_as_exact_as_the_textbook(family):
    assert_as_exact_in_bf16(family, accelerate, logits_and_gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_bf16_base_the_accelerated_scores_are_as_exact_as_the_textbook(family):
    prompts = PROMPTS["padded"]
    generator = torch.Generator().manual_seed(4)
    rollout = generate(adapted(family), prompts, 3, 9, 0.8, (1, 2, 3), generator)
    assert grpo.score(accelerate(gentle_model(family, 0)), prompts, rollout.ids, rollout.mask(),
                      0.8).dtype == torch.float32
    assert_as_exact_in_bf16(family, accelerate,
                            lambda model: scores_and_gradients(model, prompts, rollout, 0.8))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("textbook_class", FAST, ids=lambda each: each.__name__)
def test_each_twin_alone_equals_its_textbook_class(textbook_class, family):
    textbook, mixed = adapted(family), adapted(family)
    assert issubclass(FAST[textbook_class], textbook_class)
    assert swap_one(mixed, textbook_class) > 0
    logits, gradients = logits_and_gradients(textbook)
    mixed_logits, mixed_gradients = logits_and_gradients(mixed)
    torch.testing.assert_close(mixed_logits, logits, atol=1e-4, rtol=1e-4)
    assert_same_gradients(mixed_gradients, gradients)

    prompts = PROMPTS["padded"]
    rollout = generate(textbook, prompts, 2, 6, 1.3, (1, 2, 3), torch.Generator().manual_seed(4))
    scores, gradients = scores_and_gradients(textbook, prompts, rollout, 1.3)
    mixed_scores, mixed_gradients = scores_and_gradients(mixed, prompts, rollout, 1.3)
    torch.testing.assert_close(mixed_scores, scores, atol=1e-4, rtol=1e-4)
    assert_same_gradients(mixed_gradients, gradients)
    with torch.no_grad():  # some twins take another path without gradients
        torch.testing.assert_close(mixed(IDS, START), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("textbook_class", FAST, ids=lambda each: each.__name__)
def test_each_twin_alone_is_as_exact_in_bf16(textbook_class, family):
    def make_fast(model):
        assert swap_one(model, textbook_class) > 0
        return model
    assert_as_exact_in_bf16(family, make_fast, logits_and_gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_can_be_pretrained_accelerated(family):
    """Without adapters every weight learns, as in support/tiny.py: norms and biases too."""
    textbook = small_model(family).requires_grad_(True)
    accelerated = accelerate(small_model(family).requires_grad_(True))
    logits, gradients = logits_and_gradients(textbook)
    fast_logits, fast_gradients = logits_and_gradients(accelerated)
    torch.testing.assert_close(fast_logits, logits, atol=1e-4, rtol=1e-4)
    assert any("layernorm" in name for name in gradients)
    # The keys' bias adds the same number to all of a row's scores, so its gradient is only noise.
    gradients = {name: value for name, value in gradients.items() if "k_proj.bias" not in name}
    fast_gradients = {name: fast_gradients[name] for name in gradients}
    assert_same_gradients(fast_gradients, gradients)


@pytest.mark.parametrize("frozen_input", [True, False])
@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6)])
def test_an_adapted_layer_alone_has_autograds_gradient(shape, frozen_input):
    """The first layer's input needs no gradient."""
    generator = torch.Generator().manual_seed(0)
    base = torch.nn.Linear(6, 7)
    textbook = lora.LoRALinear(base.requires_grad_(False), 3, 5.1, generator)
    textbook.lora_B.data = torch.randn(7, 3, generator=generator)
    twin = accelerate(copy.deepcopy(textbook))
    inputs = torch.randn(*shape, generator=generator)
    x = inputs.clone().requires_grad_(not frozen_input)
    fast_x = inputs.clone().requires_grad_(not frozen_input)
    y, fast_y = textbook(x), twin(fast_x)
    torch.testing.assert_close(fast_y, y)
    y.square().sum().backward()
    fast_y.square().sum().backward()
    torch.testing.assert_close(twin.lora_A.grad, textbook.lora_A.grad, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(twin.lora_B.grad, textbook.lora_B.grad, atol=1e-3, rtol=1e-4)
    assert (fast_x.grad is None) == frozen_input
    if not frozen_input:
        torch.testing.assert_close(fast_x.grad, x.grad, atol=1e-3, rtol=1e-4)


def test_accelerate_changes_neither_names_nor_parameters():
    textbook = adapted("qwen3")
    before = textbook.state_dict(keep_vars=True)
    adapters = list(lora.parameters(textbook))
    assert accelerate(textbook) is textbook
    after = textbook.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(lora.parameters(textbook)) == adapters


def test_an_accelerated_module_is_still_an_instance_of_its_textbook_class():
    textbook, accelerated = make_pair("qwen3")
    classes = {type(module) for module in textbook.modules()}
    assert {lora.LoRALinear, RMSNorm, MLP, Attention, Transformer} <= classes
    pairs = list(zip(textbook.modules(), accelerated.modules()))
    assert len(pairs) == len(list(accelerated.modules()))
    for module, twin in pairs:
        assert isinstance(twin, type(module))
        assert type(twin) is FAST.get(type(module), type(module))
    assert lora.layers(accelerated).keys() == lora.layers(textbook).keys()
    types = [type(module) for module in accelerated.modules()]
    accelerate(accelerated)  # twice is once
    assert [type(module) for module in accelerated.modules()] == types


@pytest.mark.parametrize("family", FAMILIES)
def test_disabled_and_merged_adapters_of_an_accelerated_model(family, tmp_path):
    textbook, accelerated = make_pair(family)
    with torch.no_grad():
        with lora.disabled(accelerated):
            torch.testing.assert_close(accelerated(IDS, START), small_model(family)(IDS, START),
                                       atol=1e-4, rtol=1e-4)
        with lora.merged(accelerated):
            torch.testing.assert_close(accelerated(IDS, START), textbook(IDS, START),
                                       atol=1e-4, rtol=1e-4)
        lora.save(accelerated, tmp_path)
        loaded = lora.load(accelerate(small_model(family)), tmp_path)
        torch.testing.assert_close(loaded(IDS, START), textbook(IDS, START), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4, 0.0])
@pytest.mark.parametrize("lengths", PROMPTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_decoders_sample_the_same_tokens(family, lengths, temperature):
    textbook, accelerated = make_pair(family)
    request = (PROMPTS[lengths], 5, 14, temperature, (1, 2, 3, 4))
    rollout = generate(textbook, *request, torch.Generator().manual_seed(7))
    fast_rollout = generate(accelerated, *request, torch.Generator().manual_seed(7))
    assert torch.equal(fast_rollout.ids, rollout.ids)
    assert torch.equal(fast_rollout.lengths, rollout.lengths)
    assert torch.equal(fast_rollout.finished, rollout.finished)
    torch.testing.assert_close(fast_rollout.logprobs, rollout.logprobs, atol=1e-4, rtol=1e-4)
    if temperature:
        assert len(set(rollout.lengths.tolist())) > 2  # some end early, at different times


def test_each_kind_of_model_uses_its_own_decoder(monkeypatch):
    used = []
    for module in (sample, decoder):
        def record(self, *arguments, step=module.Decoder.step, name=module.__name__):
            used.append(name)
            return step(self, *arguments)
        monkeypatch.setattr(module.Decoder, "step", record)
    textbook, accelerated = make_pair()
    generate(textbook, [[3]], 1, 2, 1.0, (), torch.Generator())
    generate(accelerated, [[3]], 1, 2, 1.0, (), torch.Generator())
    assert used == ["sample", "support.decoder"]


def fast_logprobs(hidden, head, targets, temperature):
    """The accelerated model's log-probabilities with this head (V, D)."""
    model = accelerate(small_model())
    model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    return model.logprobs(hidden, targets, temperature)


@pytest.mark.parametrize("rows_at_once", [1, 4, 5, 11, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_in_chunks_are_those_of_log_softmax(temperature, rows_at_once,
                                                              monkeypatch):
    monkeypatch.setattr(fast, "LOGITS_AT_ONCE", 37 * rows_at_once)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 6, generator=generator)
    head = torch.randn(37, 6, generator=generator)
    weights = torch.randn(11, generator=generator)
    targets = torch.arange(11) * 3
    x = hidden.clone().requires_grad_()
    logprobs = fast_logprobs(x, head, targets, temperature)
    (logprobs * weights).sum().backward()
    exact = hidden.double().requires_grad_()
    logits = exact @ head.double().T / temperature
    expected = logits.log_softmax(-1)[torch.arange(11), targets]
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


def test_fewer_logits_than_one_row_are_still_one_row_at_a_time(monkeypatch):
    monkeypatch.setattr(fast, "LOGITS_AT_ONCE", 1)
    hidden = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    head = torch.randn(37, 6, generator=torch.Generator().manual_seed(1))
    expected = (hidden @ head.T).log_softmax(-1)[:, 5]
    found = fast_logprobs(hidden, head, torch.full((4,), 5), 1.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_no_tensor_holds_the_logits_of_all_tokens(monkeypatch):
    monkeypatch.setattr(fast, "LOGITS_AT_ONCE", 500 * 3)
    sizes = []

    class RecordSizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and 500 in result.shape[1:]:
                sizes.append(len(result))
            return result

    hidden = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.randn(500, 6, generator=torch.Generator().manual_seed(1))
    with RecordSizes():
        fast_logprobs(hidden, head, torch.arange(40), 1.0).sum().backward()
    rows = [size for size in sizes if size != 6]  # (6, 500) is the head, transposed
    assert rows
    assert max(rows) == 3


def test_log_probabilities_of_no_token_and_without_gradient():
    head = torch.randn(37, 6, generator=torch.Generator().manual_seed(0))
    nothing = torch.zeros(0, 6, requires_grad=True)
    logprobs = fast_logprobs(nothing, head, torch.zeros(0, dtype=torch.long), 1.0)
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert nothing.grad.shape == (0, 6)
    with torch.no_grad():
        found = fast_logprobs(torch.ones(2, 6), head, torch.tensor([3, 4]), 1.0)
    expected = (torch.ones(2, 6) @ head.T).log_softmax(-1)[torch.arange(2), torch.tensor([3, 4])]
    torch.testing.assert_close(found, expected)


def test_log_softmax_is_in_fp32_on_a_bf16_base():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(30, 36, generator=generator).bfloat16()
    head = (0.4 * torch.randn(37, 36, generator=generator)).bfloat16()
    found = fast_logprobs(hidden, head, torch.arange(30), 0.9)
    logits = (hidden @ head.T).double() / 0.9
    expected = logits.log_softmax(-1)[torch.arange(30), torch.arange(30)]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_token_that_is_nearly_sure_keeps_its_slope_in_bf16():
    logits = torch.tensor([7.0, 0.0, 0.0, 0.0])  # p = 0.997
    hidden = logits[None].bfloat16().requires_grad_()
    fast_logprobs(hidden, torch.eye(4).bfloat16(), torch.tensor([0]), 1.0).sum().backward()
    expected = torch.eye(4)[0] - logits.softmax(0)
    torch.testing.assert_close(hidden.grad[0].float(), expected, atol=0, rtol=0.02)


ADVANTAGES = torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0], [-0.3, 0.7, -0.4]])


def whole_step(model, rollout, config, old=None):
    """-> (metrics, the gradient of every adapter, by name), of one policy update."""
    model.zero_grad()
    prompts = PROMPTS["padded"]
    reference = None
    if config.kl:
        reference = grpo.reference_logprobs(model, prompts, rollout, config)
    metrics = grpo.accumulate_gradient(model, prompts, rollout, ADVANTAGES, config, reference, old)
    return metrics, {name: parameter.grad for name, parameter in lora.parameters(model).items()}


@pytest.mark.parametrize("options", [
    dict(kl=0.1, micro_batch=2),
    dict(kl=0.0, micro_batch=1),
    dict(kl=0.1, micro_batch=3, recompute=True)],
    ids=["kl", "no kl", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_step_gives_the_textbook_gradient(family, options, monkeypatch):
    config = Config(temperature=0.9, **options)
    monkeypatch.setattr(fast, "LOGITS_AT_ONCE", 37 * 7)  # seven tokens at a time
    textbook, accelerated = make_pair(family)
    accelerated.recompute = config.recompute
    generator = torch.Generator().manual_seed(4)
    rollout = generate(textbook, PROMPTS["padded"], 3, 12, 0.9, (1, 2, 3), generator)
    noise = torch.randn(rollout.logprobs.shape, generator=torch.Generator().manual_seed(1))
    for old in (None, rollout.logprobs + 0.3 * noise):
        metrics, gradients = whole_step(textbook, rollout, config, old)
        fast_metrics, fast_gradients = whole_step(accelerated, rollout, config, old)
        assert fast_metrics == pytest.approx(metrics, abs=1e-5)
        assert_same_gradients(fast_gradients, gradients)
    assert metrics["clip_share"] > 0.05


def test_a_step_of_an_accelerated_model_keeps_the_base_and_starts_at_kl_zero():
    """Sampling, the reference, the gradient and the update: the base weights keep every bit."""
    model = accelerate(lora.apply(small_model(), 4))
    base = {name: parameter.clone() for name, parameter in model.named_parameters()
            if "lora_" not in name}
    generator = torch.Generator().manual_seed(4)
    optimizer = torch.optim.AdamW(lora.parameters(model).values(), lr=1e-2)
    config = Config(temperature=0.9, kl=0.1)
    for step in range(2):  # in the second step the decoder has something to merge
        rollout = generate(model, PROMPTS["padded"], 3, 12, 0.9, (1, 2, 3), generator)
        metrics, _ = whole_step(model, rollout, config)
        assert (metrics["kl"] == 0.0) == (step == 0)
        optimizer.step()
    for name, layer in lora.layers(model).items():
        assert (layer.lora_B != 0).any(), name
    for name, parameter in base.items():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_fast_scores_are_those_of_whole_sequences():
    textbook, accelerated = make_pair()
    prompts = PROMPTS["padded"]
    rollout = generate(accelerated, prompts, 4, 10, 0.7, (1, 2), torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = grpo.score(accelerated, prompts, rollout.ids, rollout.mask(), 0.7)
        expected = score_naive(textbook, prompts, rollout.ids, rollout.mask(), 0.7)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rollout.logprobs, expected, atol=1e-4, rtol=1e-4)
