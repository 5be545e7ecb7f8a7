"""Adapters against PEFT in both directions, and the promises about the base weights."""
import json

import pytest
import torch
import transformers
from conftest import adapted, small_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import lora

IDS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("family, targets", [("qwen2", lora.TARGETS), ("llama", ("q_proj", "v_proj")), ("qwen3", ("down_proj",))])
def test_peft_loads_ours(family, targets, tmp_path):
    model = adapted(family, size=0.2, alpha=10, targets=targets)
    small_model(family).save_pretrained(tmp_path / "base")
    lora.save(model, tmp_path / "adapter", base="somewhere/base")
    theirs = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(model(IDS), theirs(IDS).logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(model(IDS), small_model(family)(IDS), atol=1e-2)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], "all-linear"])
def test_ours_loads_pefts(targets, tmp_path):
    small_model().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = get_peft_model(base, LoraConfig(r=3, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = lora.load(small_model(), tmp_path / "adapter")
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, atol=1e-4, rtol=1e-4)


def test_a_fresh_adapter_is_invisible_and_disabled_is_the_base():
    base = small_model()(IDS)
    assert torch.equal(lora.apply(small_model())(IDS), base)
    model = adapted(size=0.2)
    with lora.disabled(model):
        with lora.disabled(model):
            assert torch.equal(model(IDS), base)
        assert torch.equal(model(IDS), base)                # the outer block is still one
    assert not torch.equal(model(IDS), base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_keeps_the_function_and_restores_the_bits(dtype):
    model = adapted(size=0.2)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(dtype)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    expected = model(IDS)
    with pytest.raises(RuntimeError, match="inside"):
        with lora.merged(model):
            found = model(IDS)
            if dtype == torch.float32:
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            else:                                           # of all logits together: single ones depend on the machine
                assert (found - expected).float().norm() < 0.06 * expected.float().norm()
            raise RuntimeError("inside")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.equal(model(IDS), expected)


def test_the_adapted_layer_has_autograds_gradient():
    generator = torch.Generator().manual_seed(0)
    x, W, A, B = (torch.randn(*shape, generator=generator) for shape in ((2, 5, 6), (7, 6), (3, 6), (7, 3)))
    bias = torch.randn(7, generator=generator)
    for frozen_input in (False, True):                      # the first layer's input needs no gradient
        ours, theirs = ([x.clone().requires_grad_(not frozen_input), A.clone().requires_grad_(), B.clone().requires_grad_()] for _ in range(2))
        y = lora.Adapted.apply(ours[0], W, bias, ours[1], ours[2], 1.7)
        expected = theirs[0] @ W.T + bias + 1.7 * (theirs[0] @ theirs[1].T) @ theirs[2].T
        torch.testing.assert_close(y, expected)
        y.square().sum().backward(), expected.square().sum().backward()
        for a, b in zip(ours[frozen_input:], theirs[frozen_input:]):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-3, rtol=1e-4)
        assert frozen_input == (ours[0].grad is None)


def test_adapters_are_fp32_on_any_base_and_only_they_learn():
    model = lora.apply(small_model().to(torch.bfloat16))
    assert all(parameter.dtype == torch.float32 for parameter in lora.parameters(model).values())
    model(IDS).float().square().sum().backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning and all("lora_" in name for name in learning)
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


def test_a_saved_adapter_comes_back_bit_for_bit(tmp_path):
    model = adapted(rank=5, size=0.2, alpha=3)
    lora.save(model, tmp_path)
    again = lora.load(small_model(), tmp_path)
    assert torch.equal(model(IDS), again(IDS))
    assert torch.equal(lora.load(adapted(rank=5, size=0.2), tmp_path)(IDS), again(IDS))            # over an adapter that is there


def test_targets_and_ranks_that_make_no_sense():
    for options in ({"targets": ("q_proj", "lm_head")}, {"targets": ()}, {"rank": 0}, {"alpha": -1.0}):
        with pytest.raises(ValueError):
            lora.apply(small_model(), **options)


def rewrite(**changes):
    def damage(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return damage


def reshape(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    key = sorted(tensors)[0]
    save_file(tensors | {key: torch.zeros(2, 2)}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("damage, word", [
    (rewrite(peft_type="PREFIX"), "PREFIX"), (rewrite(use_dora=True), "use_dora"), (rewrite(r=0), "r is 0"),
    (rewrite(lora_alpha="x"), "lora_alpha"), (rewrite(r=9), "shape"), (reshape, "shape"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"junk"), "readable"),
    (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json")])
def test_a_damaged_adapter_is_one_clear_error(damage, word, tmp_path):
    lora.save(adapted(size=0.2), tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=word):
        lora.load(small_model(), tmp_path)


def test_an_adapter_of_another_model(tmp_path):
    lora.save(adapted("qwen2", size=0.2), tmp_path)
    with pytest.raises(ValueError, match="shape|unexpected"):
        lora.load(small_model("llama"), tmp_path)
