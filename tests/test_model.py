"""The decoder against transformers' own Qwen2, Qwen3 and Llama, and against itself with prefixes.

All modules here are the textbook ones; tests/support/test_fast.py compares the fast ones with them.
"""
import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import lora
from model import RMSNorm, SharedPrefix, Transformer, checkpoint_name, rotate
from support.hub import ModelConfig
from tests.conftest import adapted, small_config, small_model

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
OLD_LLAMA3 = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
VARIANTS = {
    "qwen2": dict(family="qwen2"),
    "qwen2 tied": dict(family="qwen2", tie_word_embeddings=True),
    "llama": dict(family="llama"),
    "llama biased": dict(family="llama", attention_bias=True, mlp_bias=True,
                         tie_word_embeddings=True),
    "llama 3": dict(family="llama", rope_parameters=LLAMA3),
    "llama 3, old names": dict(family="llama", rope_theta=500.0, rope_scaling=OLD_LLAMA3),
    "qwen3": dict(family="qwen3"),
    "qwen3 biased": dict(family="qwen3", attention_bias=True, num_key_value_heads=2),
}


def transformers_model(config: dict, seed: int = 0):
    torch.manual_seed(seed)
    config = dict(config)
    theirs = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    theirs = transformers.AutoModelForCausalLM.from_config(theirs)
    for parameter in theirs.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return theirs.float().eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_transformers(variant, tmp_path):
    config = small_config(**VARIANTS[variant])
    theirs = transformers_model(config)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))  # as users have it, old names and all
    ours = Transformer.from_pretrained(tmp_path).requires_grad_(True)
    ids = torch.randint(37, (3, 29), generator=torch.Generator().manual_seed(1))
    weights = torch.randn(3, 29, 37, generator=torch.Generator().manual_seed(2))
    logits = ours(ids)
    expected_logits = theirs(ids).logits
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)
    (logits * weights).sum().backward()
    (expected_logits * weights).sum().backward()
    for name, parameter in ours.named_parameters():
        expected = theirs.get_parameter(checkpoint_name(name)).grad
        tolerance = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(parameter.grad, expected, atol=tolerance, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_our_folders_load_in_transformers(family, tmp_path):
    ours = small_model(family)
    ours.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(20).view(2, 10)
    torch.testing.assert_close(ours(ids), theirs(ids).logits.detach(), atol=1e-4, rtol=1e-4)


def test_a_saved_folder_comes_back_frozen_and_bit_for_bit(tmp_path):
    ours = small_model().to(torch.bfloat16)
    ours.save_pretrained(tmp_path)
    again = Transformer.from_pretrained(tmp_path, torch.bfloat16)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert again.state_dict().keys() == ours.state_dict().keys()
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_saved_folder_holds_no_adapters(tmp_path):
    adapted().save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names == {checkpoint_name(name) for name, _ in small_model().named_parameters()}


def test_sharded_folders_and_bf16(tmp_path):
    theirs = transformers_model(small_config("qwen2"))
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = torch.arange(12).view(1, 12)
    ours = Transformer.from_pretrained(tmp_path)
    torch.testing.assert_close(ours(ids), theirs(ids).logits.detach(), atol=1e-4, rtol=1e-4)
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
    for row, found in zip(rows, logits):
        alone = model(torch.tensor([row]))[0]
        torch.testing.assert_close(found[5 - len(row):], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_a_shared_prefix_equals_a_repeated_prefix_in_values_and_gradients(family, padded):
    prompts = torch.tensor([[1, 2, 3, 4], [0, 0, 5, 6]])
    start = torch.tensor([0, 2]) if padded else None
    starts = torch.tensor([0, 0, 0, 2, 2, 2]) if padded else None
    generator = torch.Generator().manual_seed(0)
    responses = torch.randint(37, (6, 5), generator=generator)

    shared = adapted(family)
    prefix = SharedPrefix(3)
    assert prefix.length == 0
    shared.hidden(prompts, start, prefix)
    assert prefix.length == 4
    assert len(prefix.prompts) == 3
    found = shared.hidden(responses, start, prefix)

    repeated = adapted(family)
    sequences = torch.cat((prompts.repeat_interleave(3, 0), responses), dim=1)
    expected = repeated.hidden(sequences, starts)[:, 4:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    weights = torch.randn(found.shape, generator=generator)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in lora.parameters(repeated).items():
        tolerance = 1e-5 * parameter.grad.abs().max().item()
        torch.testing.assert_close(lora.parameters(shared)[name].grad, parameter.grad,
                                   atol=tolerance, rtol=1e-4, msg=name)


@pytest.mark.parametrize("recompute", [True, False])
def test_recomputing_runs_every_layer_again_for_the_gradient_and_stores_no_prompt_twice(recompute):
    model = adapted()
    model.recompute = recompute
    calls = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    prefix = SharedPrefix(1)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        model.hidden(ids)
    assert len(calls) == 3
    hidden = model.hidden(ids, prefix=prefix)
    hidden = hidden + model.hidden(ids, prefix=prefix)
    assert len(calls) == 9
    hidden.sum().backward()
    assert len(calls) == (15 if recompute else 9)
    assert len(prefix.prompts) == 3


def test_a_layer_adds_attention_and_then_the_mlp_to_its_input():
    model = small_model("qwen3")
    x, context = model.embed(torch.tensor([[0, 4, 9], [5, 6, 7]]), torch.tensor([1, 0]))
    layer = model.layers[0]
    attended = x + layer.self_attn(layer.input_layernorm(x), *context)
    expected = attended + layer.mlp(layer.post_attention_layernorm(attended))
    assert torch.equal(layer(x, *context), expected)
    assert not torch.equal(attended, x)


def test_a_rotation_multiplies_complex_numbers():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, generator=generator)
    angles = torch.randn(2, 3, 1, 4, dtype=torch.float64, generator=generator)
    y = rotate(x, angles.cos(), angles.sin())
    pairs = torch.complex(*x.chunk(2, dim=-1))
    turned = torch.complex(*y.chunk(2, dim=-1))
    torch.testing.assert_close(turned, pairs * torch.polar(torch.ones_like(angles), angles))
    torch.testing.assert_close(rotate(y, angles.cos(), -angles.sin()), x)


def test_a_norm_by_hand_and_in_fp32_on_a_bf16_base():
    norm = RMSNorm(2, eps=0.5)
    norm.weight.data = torch.tensor([1.0, 10.0])
    found = norm(torch.tensor([[3.0, 4.0]]))
    root = ((9 + 16) / 2 + 0.5) ** 0.5
    torch.testing.assert_close(found, torch.tensor([[3 / root, 40 / root]]))
    norm = RMSNorm(36, eps=1e-6).to(torch.bfloat16)
    x = torch.randn(200, 36, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    assert (norm(x) == exact.bfloat16()).float().mean() > 0.99


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_logprobs_are_the_log_softmax_of_the_logits_over_the_temperature(temperature):
    model = small_model()
    ids = torch.arange(12).view(1, 12)
    targets = torch.arange(12) * 3
    expected = (model(ids)[0].double() / temperature).log_softmax(-1)[torch.arange(12), targets]
    found = model.logprobs(model.hidden(ids)[0], targets, temperature)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_log_softmax_is_in_fp32_on_a_bf16_base():
    model = small_model().to(torch.bfloat16)
    hidden = torch.randn(30, 36, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(30)
    found = model.logprobs(hidden, targets, 0.9)
    logits = (hidden @ model.head.T).double() / 0.9
    expected = logits.log_softmax(-1)[torch.arange(30), targets]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes, word", [
    ({"model_type": "gpt2"}, "gpt2"),
    ({"model_type": None}, "model_type"),
    ({"hidden_size": -3}, "hidden_size"),
    ({"vocab_size": "many"}, "vocab_size"),
    ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
    ({"num_hidden_layers": float("inf")}, "num_hidden_layers"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"num_key_value_heads": 4}, "4 key heads"),
    ({"head_dim": 5}, "head_dim"),
    ({"hidden_act": "gelu"}, "silu"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
    ({"rope_parameters": "x"}, "rotary"),
    ({"use_sliding_window": True}, "sliding"),
    ({"quantization_config": {"bits": 4}}, "quantised"),
    ({"num_attention_heads": None}, "num_attention_heads"),
    ({"num_hidden_layers": 10 ** 9}, "num_hidden_layers"),
    ({"hidden_size": 10 ** 11}, "hidden_size"),
    ({"layer_types": ["sliding_attention"]}, "sliding")])
def test_a_bad_config_is_one_clear_error(changes, word):
    with pytest.raises(ValueError, match=word) as caught:
        ModelConfig.from_dict(small_config("qwen2") | changes, "here/config.json")
    assert "here/config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def damage_missing(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def replace_norm(tensor):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"model.norm.weight": tensor}, folder / "model.safetensors")
    return damage


def damage_index(name):
    def damage(folder):
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": name}}))
    return damage


def one_layer_fewer(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def remove(name):
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize("damage, words", [
    (damage_missing, ["model.norm.weight", "lacks", "(1 in all)"]),
    (replace_norm(torch.zeros(5)), ["model.norm.weight", "(5,)", "(36,)"]),
    (replace_norm(torch.zeros(36, dtype=torch.int32)), ["model.norm.weight", "int32", "float32"]),
    (replace_norm(torch.full((36,), math.nan)), ["model.norm.weight", "not finite"]),
    (replace_norm(torch.full((36,), -math.inf)), ["model.norm.weight", "not finite"]),
    (one_layer_fewer, ["too many tensors", "config.json", "model.layers.2."]),
    (write("model.safetensors", b"\x10" * 100), ["model.safetensors", "readable"]),
    (cut_short, ["model.safetensors", "readable"]),
    (remove("model.safetensors"), ["model.safetensors", "missing"]),
    (remove("config.json"), ["config.json"]),
    (write("config.json", b"{"), ["config.json", "JSON"]),
    (write("config.json", b"[1]"), ["config.json", "list"]),
    (damage_index("../secret.safetensors"), ["../secret.safetensors"]),
    (damage_index("/etc/passwd"), ["/etc/passwd"]),
    (damage_index(3), ["3 is missing"]),
    (damage_index("gone.safetensors"), ["gone.safetensors"]),
    (write("model.safetensors.index.json", b'{"weight_map": []}'), ["weight_map"])])
def test_a_damaged_folder_is_one_clear_error(damage, words, tmp_path):
    small_model().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError) as caught:
        Transformer.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_old_buffers_and_the_head_of_a_tied_model_are_no_strangers(tmp_path):
    tied = small_model(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
             "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    ids = torch.arange(10)[None]
    assert torch.equal(Transformer.from_pretrained(tmp_path)(ids), tied(ids))


def test_weights_that_are_not_finite_are_never_written(tmp_path):
    model = small_model()
    model.norm.weight.data[3] = math.nan
    with pytest.raises(ValueError, match="model.norm.weight .* not finite"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["no/such-model", "./nothing", "word", "a/b/c", "model.gguf"])
def test_a_model_that_is_nowhere_is_one_clear_error(name):
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        Transformer.from_pretrained(name)
