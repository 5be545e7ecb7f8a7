"""The decoder against transformers' own Qwen2, Qwen3 and Llama, and against itself with and without a cache."""
import json

import pytest
import torch
import transformers
from conftest import small_config, small_model
from safetensors.torch import load_file, save_file

from model import Gated, ModelConfig, Rotated, SharedPrefix, Transformer, checkpoint_name

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
VARIANTS = {
    "qwen2": dict(family="qwen2"),
    "qwen2 tied": dict(family="qwen2", tie_word_embeddings=True),
    "llama": dict(family="llama"),
    "llama biased": dict(family="llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama 3": dict(family="llama", rope_parameters=LLAMA3),
    "llama 3, old names": dict(family="llama", rope_theta=500.0, rope_scaling={k: v for k, v in LLAMA3.items() if k != "rope_theta"}),
    "qwen3": dict(family="qwen3"),
    "qwen3 biased": dict(family="qwen3", attention_bias=True, num_key_value_heads=2),
}


def theirs_of(config: dict, seed: int = 0):
    torch.manual_seed(seed)
    config = dict(config)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(config.pop("model_type"), **config))
    for parameter in theirs.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return theirs.float().eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_transformers(variant, tmp_path):
    config = small_config(**VARIANTS[variant])
    theirs = theirs_of(config)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))           # the file as users have it, old names and all
    ours = Transformer.from_pretrained(tmp_path).requires_grad_(True)
    ids = torch.randint(37, (3, 29), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(3, 29, 37, generator=torch.Generator().manual_seed(2))
    logits = [model(ids) if model is ours else model(ids).logits for model in (ours, theirs)]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
    for value in logits:
        (value * weights).sum().backward()
    for name, parameter in ours.named_parameters():
        expected = theirs.get_parameter(checkpoint_name(name)).grad
        torch.testing.assert_close(parameter.grad, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_our_folders_load_in_transformers(family, tmp_path):
    ours = small_model(family)
    ours.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(20).view(2, 10)
    torch.testing.assert_close(ours(ids), theirs(ids).logits.detach(), atol=1e-4, rtol=1e-4)


def test_sharded_folders_and_bf16(tmp_path):
    theirs = theirs_of(small_config("qwen2"))
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = torch.arange(12).view(1, 12)
    torch.testing.assert_close(Transformer.from_pretrained(tmp_path)(ids), theirs(ids).logits.detach(), atol=1e-4, rtol=1e-4)
    half = Transformer.from_pretrained(tmp_path, torch.bfloat16)
    expected = theirs.to(torch.bfloat16)(ids).logits.detach()
    assert half(ids).dtype == torch.bfloat16
    assert (half(ids) - expected).abs().max() < 0.05 * expected.abs().max()


def test_left_padding_changes_nothing():
    model = small_model("qwen3")
    rows = [[4, 9, 2, 11, 30], [8, 8], [1, 2, 3]]
    ids = torch.tensor([[0] * (5 - len(row)) + row for row in rows])
    logits = model(ids, torch.tensor([5 - len(row) for row in rows]))
    assert logits.isfinite().all()
    for row, out in zip(rows, logits):
        torch.testing.assert_close(out[5 - len(row):], model(torch.tensor([row]))[0], atol=1e-5, rtol=1e-5)


def test_the_gate_has_autograds_gradient():
    gate, up = (torch.randn(5, 7, generator=torch.Generator().manual_seed(n), dtype=torch.float64).requires_grad_() for n in (0, 1))
    assert torch.autograd.gradcheck(Gated.apply, (gate, up))


def test_shared_prefix_equals_repeated_prefix():
    model, prompts = small_model("qwen2"), torch.tensor([[1, 2, 3, 4], [0, 0, 5, 6]])
    start, responses = torch.tensor([0, 2]), torch.randint(37, (6, 5), generator=torch.Generator().manual_seed(0))
    prefix = SharedPrefix(3)
    model.hidden(prompts, start, prefix)
    shared = model.hidden(responses, start.repeat_interleave(3), prefix)
    whole = model.hidden(torch.cat((prompts.repeat_interleave(3, 0), responses), 1), start.repeat_interleave(3))
    torch.testing.assert_close(shared, whole[:, 4:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes, word", [
    ({"model_type": "gpt2"}, "gpt2"), ({"model_type": None}, "model_type"), ({"hidden_size": -3}, "hidden_size"),
    ({"vocab_size": "many"}, "vocab_size"), ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
    ({"num_hidden_layers": float("inf")}, "num_hidden_layers"), ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"num_key_value_heads": 4}, "key-value"), ({"head_dim": 5}, "head_dim"), ({"hidden_act": "gelu"}, "silu"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"), ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
    ({"rope_parameters": "x"}, "rotary"), ({"use_sliding_window": True}, "sliding"),
    ({"quantization_config": {"bits": 4}}, "quantised"), ({"num_attention_heads": None}, "num_attention_heads"),
    ({"num_hidden_layers": 10 ** 9}, "num_hidden_layers"), ({"hidden_size": 10 ** 11}, "hidden_size"),
    ({"layer_types": ["sliding_attention"]}, "sliding")])
def test_a_bad_config_is_one_clear_error(changes, word):
    with pytest.raises(ValueError, match=word) as caught:
        ModelConfig.from_dict(small_config("qwen2") | changes, "here/config.json")
    assert "here/config.json" in str(caught.value) and "\n" not in str(caught.value)


def damage_missing(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def damage_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(5)
    save_file(tensors, folder / "model.safetensors")


def damage_index(name):
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


@pytest.mark.parametrize("damage, words", [
    (damage_missing, ["model.norm.weight", "missing"]),
    (damage_shape, ["model.norm.weight", "(5,)", "(36,)", "model.safetensors"]),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"\x10" * 100), ["model.safetensors", "readable"]),
    (lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-50]), ["readable"]),
    (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors", "missing"]),
    (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    (lambda folder: (folder / "config.json").write_text("{"), ["config.json", "JSON"]),
    (lambda folder: (folder / "config.json").write_text("[1]"), ["config.json", "list"]),
    (damage_index("../secret.safetensors"), ["../secret.safetensors"]), (damage_index("/etc/passwd"), ["/etc/passwd"]),
    (damage_index(3), ["weight_map"]), (damage_index("gone.safetensors"), ["gone.safetensors"])])
def test_a_damaged_folder_is_one_clear_error(damage, words, tmp_path):
    small_model().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError) as caught:
        Transformer.from_pretrained(tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_model_that_is_nowhere():
    for name in ("no/such-model", "./nothing", "word", "a/b/c"):
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            Transformer.from_pretrained(name)


def test_the_gradient_of_a_rotation_is_turned_back():
    x, angles = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True), torch.randn(2, 3, 1, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: Rotated.apply(x, angles.cos(), angles.sin()), (x,))
    y = Rotated.apply(x, angles.cos(), angles.sin())
    pairs, turned = (torch.complex(*t.chunk(2, dim=-1)) for t in (x, y))
    torch.testing.assert_close(turned, pairs * torch.polar(torch.ones_like(angles), angles))
