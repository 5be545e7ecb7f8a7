"""Hugging Face folders: a model's config.json, weights, tokenizer and end tokens.

A folder is used as it is; a hub id is downloaded, or found in the hub's own cache. Nothing in a
folder is run: config.json is read as JSON and checked, weights are safetensors.
"""
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn

from support import files

FAMILIES = ("llama", "qwen2", "qwen3")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")  # old buffers; the head of a tied model
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """What config.json says, checked; `raw` is the file itself."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # max_position_embeddings
    norm_eps: float
    rope_theta: float
    rope_llama3: tuple | None  # the four numbers of LLAMA3_ROPE, in its order
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    raw: dict

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "ModelConfig":
        def require(condition, message):
            if not condition:
                raise ValueError(f"{where}: {message}")

        def number(key, default=None, kind=int, most=2 ** 24, source=raw):
            value = default if source.get(key) is None else source[key]
            valid = type(value) in (int, float) and 0 < value <= most and value == kind(value)
            word = "whole number" if kind is int else "number"
            require(valid, f"{key} is {value!r}, expected a {word} of at most {most}")
            return kind(value)

        family = raw.get("model_type")
        require(family in FAMILIES, f"model_type is {family!r}, expected one of {FAMILIES}")
        require(raw.get("hidden_act", "silu") == "silu", "only the activation silu is implemented")
        require(not raw.get("quantization_config"), "quantised weights are not supported")
        windows = raw.get("use_sliding_window") or "sliding" in str(raw.get("layer_types"))
        require(not windows, "sliding-window attention is not implemented")
        # transformers 5 writes rope_parameters, transformers 4 wrote rope_theta and rope_scaling.
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        require(isinstance(rope, dict), f"rotary parameters are {rope!r}, expected an object")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        require(rope_type in ("default", "llama3"), f"rope_type {rope_type!r} is not implemented")
        theta = number("rope_theta", 10000.0, float, 1e12)
        llama3 = None
        if rope_type == "llama3":
            llama3 = tuple(number(key, None, float, source=rope) for key in LLAMA3_ROPE)
        heads, hidden_size = number("num_attention_heads"), number("hidden_size", most=2 ** 18)
        kv_heads = number("num_key_value_heads", heads)
        head_dim = number("head_dim", 128 if family == "qwen3" else hidden_size // heads)
        require(heads % kv_heads == 0, f"{heads} heads do not divide into {kv_heads} key heads")
        require(head_dim % 2 == 0, f"head_dim is {head_dim}, rotation needs an even number")
        context, bias = 2048 if family == "llama" else 32768, bool(raw.get("attention_bias"))
        return cls(
            vocab_size=number("vocab_size"), hidden_size=hidden_size,
            intermediate_size=number("intermediate_size", most=2 ** 20),
            layers=number("num_hidden_layers", most=1000), heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, context=number("max_position_embeddings", context, most=2 ** 40),
            norm_eps=number("rms_norm_eps", 1e-6, float),
            rope_theta=number("rope_theta", theta, float, 1e12, rope), rope_llama3=llama3,
            qkv_bias=family == "qwen2" or bias, output_bias=family != "qwen2" and bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias")), qk_norm=family == "qwen3",
            tied=bool(raw.get("tie_word_embeddings")), raw=raw)


def find_model_folder(path: str | Path) -> Path:
    """A local folder as it is; a hub id is downloaded, or found in the hub's own cache."""
    folder = Path(path)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ValueError(f"{path} is an adapter: name the run's folder, or a whole model")
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf":
        raise ValueError(f"{path} is a GGUF file: tools/convert_gguf.py makes a model folder of it")
    if folder.exists() or str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise ValueError(f"{path} is not a model: expected a folder with config.json and "
                         "safetensors files, or a hub id")
    from huggingface_hub import snapshot_download  # slow to import, and needed for hub ids only
    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(str(path), allow_patterns=patterns))
    except Exception as error:  # the hub's client raises dozens of types
        raise ValueError(f"{path} is neither a folder nor a model on the hub "
                         f"({type(error).__name__}): check the name and the connection") from None


def read_weights(folder: Path, wanted):
    """Each wanted (name, tensor) of model.safetensors, or of the shards that its index lists.

    A tensor that nobody wants says that config.json and the weights do not belong together.
    """
    names = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = files.read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: expected a weight_map of tensor names to file names")
        names = sorted(set(map(str, weight_map.values())))
    missing, unknown = set(wanted), set()
    for name in names:
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise ValueError(f"{index}: shard {name!r} is not the name of a file in this folder")
        tensors = files.read_tensors(folder / name)
        unknown |= tensors.keys() - set(wanted)
        for key in sorted(missing & tensors.keys()):
            missing.remove(key)
            yield key, tensors[key]
    unknown = {name for name in unknown if not name.endswith(IGNORED)}
    for kind, odd in (("lacks", missing), ("has too many", unknown)):
        if odd:
            raise ValueError(f"{folder} {kind} tensors for its config.json, such as {min(odd)} "
                             f"({len(odd)} in all)")


def load_weights(model: nn.Module, names: dict[str, str], folder: Path, dtype: torch.dtype,
                 device: str | torch.device) -> None:
    """Read a folder's tensors into a model, frozen; names: {name in the files: parameter}."""
    for key, tensor in read_weights(folder, names.keys()):
        owner, _, leaf = names[key].rpartition(".")
        files.check_tensors({key: tensor}, {key: model.get_parameter(names[key])}, str(folder))
        parameter = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
        setattr(model.get_submodule(owner), leaf, parameter)


def open_tokenizer(folder: Path):
    from transformers import AutoTokenizer  # slow to import
    if not any((folder / name).exists() for name in TOKENIZERS):
        raise ValueError(f"{folder} has no tokenizer.json: a model folder holds its tokenizer too")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its readers raise
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder}: its tokenizer cannot be read ({why})") from None


def find_eos_ids(folder: Path, tokenizer, vocab_size: int, stop: str = "") -> tuple[int, ...]:
    """Every id that ends a response; of generation_config.json nothing else is taken."""
    ids = [tokenizer.eos_token_id]
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            value = files.read_json(folder / name).get("eos_token_id")
            ids += value if isinstance(value, list) else [value]
    known = {i for i in ids if type(i) is int and 0 <= i < vocab_size}
    if not known:
        raise ValueError(f"{folder}: no end token in its tokenizer or its config.json")
    if stop:
        text = stop.replace("\\n", "\n")
        pieces = tokenizer.batch_decode([[i] for i in range(vocab_size)])
        holding = {i for i, piece in enumerate(pieces) if text in piece}
        if not holding:
            raise ValueError(f"--stop {stop}: no token holds this text; expected a shorter one")
        known |= holding
    return tuple(sorted(known))


def find_device(name: str) -> str:
    if name == "auto":
        available = [kind for kind in ("cuda", "mps") if getattr(torch, kind).is_available()]
        return available[0] if available else "cpu"
    if name != "cpu" and not getattr(torch, name).is_available():
        raise ValueError(f"device {name} is not available here: use --device cpu or auto")
    return name
