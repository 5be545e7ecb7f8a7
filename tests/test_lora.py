"""Adapters against PEFT in both directions, and the promises about the base weights."""
import json

import pytest
import torch
import torch.nn as nn
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import lora
from tests.conftest import adapted, small_model

IDS = torch.arange(24).view(2, 12)


def half_base(model):
    """The same model with its base weights, not its adapters, in bf16."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


def test_an_adapted_layer_by_hand():
    base = nn.Linear(2, 1)
    base.weight.data = torch.tensor([[1.0, 2.0]])
    base.bias.data = torch.tensor([3.0])
    layer = lora.LoRALinear(base, rank=2, alpha=1.0, generator=torch.Generator())
    layer.lora_A.data = torch.tensor([[1.0, -2.0], [3.0, 3.0]])
    layer.lora_B.data = torch.tensor([[4.0, 0.0]])
    x = torch.tensor([[5.0, 7.0]])
    assert layer(x).item() == 5 + 2 * 7 + 3 + 0.5 * 4 * (5 - 2 * 7)
    assert lora.merge(layer).tolist() == [[1 + 0.5 * 4 * 1, 2 - 0.5 * 4 * 2]]
    layer.enabled = False
    assert layer(x).item() == 5 + 2 * 7 + 3
    assert lora.merge(layer) is layer.weight


@pytest.mark.parametrize("family, targets", [
    ("qwen2", lora.TARGETS),
    ("llama", ("q_proj", "v_proj")),
    ("qwen3", ("down_proj",))])
def test_peft_loads_ours(family, targets, tmp_path):
    model = adapted(family, size=0.2, alpha=10, targets=targets)
    assert {name.rpartition(".")[2] for name in lora.layers(model)} == set(targets)
    small_model(family).save_pretrained(tmp_path / "base")
    lora.save(model, tmp_path / "adapter", base="somewhere/base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(model(IDS), theirs(IDS).logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(model(IDS), small_model(family)(IDS), atol=1e-2)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somewhere/base"


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], "all-linear"])
def test_ours_loads_pefts(targets, tmp_path):
    small_model().save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    options = LoraConfig(r=3, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM")
    theirs = get_peft_model(base, options)
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
        assert torch.equal(model(IDS), base)  # the outer block is still one
    assert not torch.equal(model(IDS), base)


def test_an_error_inside_disabled_enables_the_adapters_again():
    model = adapted(size=0.2)
    expected = model(IDS)
    with pytest.raises(RuntimeError, match="inside"):
        with lora.disabled(model):
            raise RuntimeError("inside")
    assert torch.equal(model(IDS), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_keeps_the_function_and_restores_the_bits(dtype):
    model = adapted(size=0.2)
    if dtype == torch.bfloat16:
        model = half_base(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    expected = model(IDS)
    with pytest.raises(RuntimeError, match="inside"):
        with lora.merged(model):
            found = model(IDS)
            layer = model.layers[0].mlp.up_proj
            assert layer.weight.dtype == dtype
            assert not torch.equal(layer.weight, before["layers.0.mlp.up_proj.weight"])
            raise RuntimeError("inside")
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    else:  # of all logits together: single ones depend on the machine
        assert (found - expected).float().norm() < 0.06 * expected.float().norm()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert torch.equal(model(IDS), expected)


def test_adapters_are_fp32_on_any_base_and_only_they_learn():
    model = lora.apply(small_model().to(torch.bfloat16).requires_grad_(True))
    assert all(parameter.dtype == torch.float32 for parameter in lora.parameters(model).values())
    model(IDS).float().square().sum().backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(learning) == len(lora.parameters(model)) == 2 * 7 * 3
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in learning), name


def test_a_learning_rate_of_1e_5_moves_the_adapters_of_a_bf16_base():
    model = half_base(adapted(size=0.2))
    model(IDS).float().square().sum().backward()
    parameters = list(lora.parameters(model).values())
    before = [parameter.clone() for parameter in parameters]
    torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0).step()
    for parameter, old in zip(parameters, before):
        moved = (parameter - old)[parameter.grad.abs() > 1e-3].abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-5), atol=1e-6, rtol=0)


def test_the_product_with_an_adapter_is_in_fp32_on_a_bf16_base():
    base = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    base.weight.data.zero_()
    layer = lora.LoRALinear(base, rank=2, alpha=2.0, generator=torch.Generator())
    layer.lora_A.data = torch.tensor([[1.001], [1.0]])  # both are 1 in bf16
    layer.lora_B.data = torch.tensor([[1000.0, -1000.0]])
    y = layer(torch.ones(1, 1, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert y.item() == pytest.approx(1.0, abs=0.01)  # 1000 * 1.001 - 1000 * 1


def test_the_seed_decides_about_fresh_adapters():
    first = lora.parameters(lora.apply(small_model(), 4, seed=3))
    same = lora.parameters(lora.apply(small_model(), 4, seed=3))
    other = lora.parameters(lora.apply(small_model(), 4, seed=4))
    for name, parameter in first.items():
        assert torch.equal(parameter, same[name])
        assert torch.equal(parameter, other[name]) == name.endswith("lora_B.weight")


def test_a_fresh_adapter_is_drawn_as_pefts():
    """A is uniform between -1 / sqrt(in) and 1 / sqrt(in), B is zero."""
    for layer in lora.layers(lora.apply(small_model(), 16)).values():
        scaled = layer.lora_A * layer.in_features ** 0.5
        assert 0.97 < scaled.abs().max() <= 1
        assert abs(scaled.std().item() - 3 ** -0.5) < 0.05
        assert not layer.lora_B.any()


def test_a_saved_adapter_comes_back_bit_for_bit(tmp_path):
    model = adapted(rank=5, size=0.2, alpha=3)
    lora.save(model, tmp_path)
    again = lora.load(small_model(), tmp_path)
    assert torch.equal(model(IDS), again(IDS))
    over = lora.load(adapted(rank=5, size=0.2), tmp_path)  # over an adapter that is there
    assert torch.equal(over(IDS), again(IDS))


def test_an_adapter_saved_in_bf16_is_loaded_in_fp32(tmp_path):
    lora.save(adapted(), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    model = lora.load(small_model(), tmp_path)
    for name, parameter in lora.parameters(model).items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, load_file(file)[name].float())


def rewrite(**changes):
    def damage(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return damage


def change_tensor(change):
    """Damage one tensor of the file; a change to None removes it."""
    def damage(folder):
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        key = sorted(tensors)[0]
        tensors[key] = change(tensors[key].clone())
        save_file({name: value for name, value in tensors.items() if value is not None}, file)
    return damage


def with_number(number):
    def change(tensor):
        tensor[0, 0] = number
        return tensor
    return change_tensor(change)


def rename_all(folder):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({f"tensor {i}": tensor for i, tensor in enumerate(tensors.values())}, file)


def add_tensor(folder):
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {"one.more": torch.zeros(2)}, file)


@pytest.mark.parametrize("damage, word", [
    (rewrite(peft_type="PREFIX"), "PREFIX"),
    (rewrite(use_dora=True), "use_dora"),
    (rewrite(modules_to_save=["lm_head"]), "modules_to_save"),
    (rewrite(bias="all"), "without bias"),
    (rewrite(r=0), "r is 0"),
    (rewrite(r=2.5), "r is 2.5"),
    (rewrite(r=2 ** 40), "at most 16384"),
    (rewrite(lora_alpha="x"), "lora_alpha 'x'"),
    (rewrite(lora_alpha=float("nan")), "lora_alpha nan"),
    (rewrite(r=9), r"\(4, 50\), expected torch.float32 \(9, 50\)"),
    (change_tensor(lambda tensor: torch.zeros(2, 2)), r"is torch.float32 \(2, 2\), expected"),
    (change_tensor(lambda tensor: tensor.to(torch.int32)), "int32.* expected torch.float32"),
    (change_tensor(lambda tensor: None), "is missing"),
    (with_number(torch.nan), "not finite"),
    (with_number(-torch.inf), "not finite"),
    (add_tensor, "one.more is unexpected"),
    (rename_all, "no adapter of q_proj"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"junk"), "readable"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "missing"),
    (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json")])
def test_a_damaged_adapter_is_one_clear_error(damage, word, tmp_path):
    lora.save(adapted(size=0.2), tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=word) as caught:
        lora.load(small_model(), tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refused_adapter_leaves_the_adapters_that_were_there(tmp_path):
    lora.save(adapted(size=0.2), tmp_path)
    with_number(torch.nan)(tmp_path)
    model = adapted(size=0.1)
    expected = model(IDS)
    with pytest.raises(ValueError, match="not finite"):
        lora.load(model, tmp_path)
    assert torch.equal(model(IDS), expected)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    lora.save(adapted("qwen2", size=0.2), tmp_path)
    with pytest.raises(ValueError, match="expected|unexpected"):
        lora.load(small_model("llama"), tmp_path)
