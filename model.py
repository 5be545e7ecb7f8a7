"""The decoder: one hand-written transformer for the Qwen2, Qwen3 and Llama families.

    x = embed(ids)
    x = x + attention(norm(x));  x = x + mlp(norm(x))         for every layer
    logits = head(norm(x))

Modules carry Hugging Face's names, so a checkpoint's tensors go straight to the parameters they name and
adapters are saved under the names that PEFT expects. The families differ in three switches only: a bias on
the projections, a norm on queries and keys, and whether the head shares the embedding's weight.

Batches are padded on the left. Row b's text begins at slot `start[b]`, and that one number is all the
padding the model knows about: slot i has position i - start, and sees slot j when start <= j <= i. The same
rule serves whole sequences, prompts, and responses that continue a prompt. Single tokens have a faster way of
their own, decode.py, which tests hold to this one.

Read by everything else; needs nothing but torch and files.py.
"""
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from files import find_model_folder, find_weight_files, read_json, read_tensors, write_json, write_tensors

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """What config.json says, checked; `raw` is the file itself, which save_pretrained writes back."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int                        # max_position_embeddings
    norm_eps: float
    rope_theta: float
    rope_llama3: tuple | None           # the four numbers of ROPE_LLAMA3, in its order
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    raw: dict

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "ModelConfig":
        def number(key, default=None, kind=int, source=raw, high=2 ** 24):
            value = default if source.get(key) is None else source[key]
            if type(value) not in (int, float) or not 0 < value <= high or value != kind(value):
                raise ValueError(f"{where}: {key} is {value!r}, expected a positive {kind.__name__} of at most {high}")
            return kind(value)

        def require(condition, message):
            if not condition:
                raise ValueError(f"{where}: {message}")

        family = raw.get("model_type")
        require(family in FAMILIES, f"model_type is {family!r}, this decoder knows {', '.join(FAMILIES)}")
        require(raw.get("hidden_act", "silu") == "silu", "only the activation silu is implemented")
        require(not raw.get("quantization_config"), "quantised weights are not supported, use the original model")
        require(not raw.get("use_sliding_window") and "sliding_attention" not in str(raw.get("layer_types")),
                "sliding-window attention is not implemented")
        # transformers 5 writes rope_parameters, transformers 4 wrote rope_theta and rope_scaling.
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        require(isinstance(rope, dict), f"rotary parameters are {rope!r}, expected an object")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        require(rope_type in ("default", "llama3"), f"rope_type is {rope_type!r}, only default and llama3 are known")
        heads, kv_heads = number("num_attention_heads"), number("num_key_value_heads", raw.get("num_attention_heads"))
        hidden, bias = number("hidden_size", high=2 ** 18), bool(raw.get("attention_bias"))
        head_dim = number("head_dim", 128 if family == "qwen3" else hidden // heads)
        require(heads % kv_heads == 0, f"{heads} attention heads do not divide into {kv_heads} key-value heads")
        require(head_dim % 2 == 0, f"head_dim is {head_dim}, rotary embeddings need an even number")
        return cls(
            vocab_size=number("vocab_size"), hidden_size=hidden, intermediate_size=number("intermediate_size", high=2 ** 20),
            layers=number("num_hidden_layers", high=1000), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            context=number("max_position_embeddings", 2048 if family == "llama" else 32768, high=2 ** 40),
            norm_eps=number("rms_norm_eps", 1e-6, float),
            rope_theta=number("rope_theta", number("rope_theta", 10000.0, float, high=1e12), float, rope, 1e12),
            rope_llama3=tuple(number(key, None, float, rope) for key in ROPE_LLAMA3) if rope_type == "llama3" else None,
            qkv_bias=family == "qwen2" or bias, output_bias=family != "qwen2" and bias,
            mlp_bias=family == "llama" and bool(raw.get("mlp_bias")), qk_norm=family == "qwen3",
            tied=bool(raw.get("tie_word_embeddings")), raw=raw)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, in fp32."""
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return Normed.apply(x, self.weight, self.eps) if torch.is_grad_enabled() else rms_norm(x, self.weight, self.eps)[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """-> y, and 1 / sqrt(mean(x^2) + eps) (..., 1). The norm reads x once and leaves a single column to work on."""
    y = x.float()
    scale = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (y * scale).to(x.dtype).mul_(weight), scale


class Normed(torch.autograd.Function):
    """RMSNorm in few passes over memory. Keeps x as it is and one column, where autograd would keep bf16 as fp32."""
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, scale = rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        wide, slope = x.float(), (grad * weight).float()
        inner = torch.linalg.vecdot(wide, slope)[..., None].mul_(scale.square()).div_(-x.shape[-1])
        gain = (grad.float() * wide * scale).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return slope.addcmul_(wide, inner).mul_(scale).to(x.dtype), gain, None


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """theta^(-2i/d), and Llama 3's stretching of the wavelengths that its first training never completed."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = 1.0 / config.rope_theta ** exponents                                # (head_dim / 2)
    if config.rope_llama3:
        factor, low, high, context = config.rope_llama3
        turns = context * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)     # 1: fast, untouched; 0: slow, divided by factor
        frequencies = keep * frequencies + (1 - keep) * frequencies / factor
    return frequencies


class Rotated(torch.autograd.Function):
    """Turn each pair (x_i, x_{i + d/2}) by its position's angle. x (B, T, heads, d); cos, sin (B or 1, T, 1, d/2). The gradient
    is turned back by the same angle."""
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin), None, None


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """For Rotated alone: autograd does not see through it."""
    (left, right), y = x.chunk(2, dim=-1), torch.empty_like(x)
    for half, a, b, sign in zip(y.chunk(2, dim=-1), (left, right), (right, left), (-1, 1)):
        torch.mul(a, cos, out=half).addcmul_(b, sin, value=sign)        # into place: no copy to negate or join the halves
    return y


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim, self.kv_heads = layer, config.head_dim, config.kv_heads
        self.grouped = config.kv_heads < config.heads
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache, offset: int) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim))                 # (B, T, heads, head_dim)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = Rotated.apply(q, cos, sin), Rotated.apply(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)        # (B, heads, T, head_dim)
        if cache is not None:
            k, v = cache.append(self.layer, k, v, offset)                             # (B, kv_heads, slots, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and x.shape[1] > 1,
                                           enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(Gated.apply(self.gate_proj(x), self.up_proj(x)))


class Gated(torch.autograd.Function):
    """silu(gate) * up. Keeps gate and up only, where autograd alone would keep silu(gate) too."""
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache, offset: int) -> Tensor:
        return x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, offset)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache, offset: int) -> Tensor:
        x = self.attend(x, cos, sin, mask, cache, offset)
        return x + self.mlp(self.post_attention_layernorm(x))


class SharedPrefix:
    """Keys and values of prompts, with their gradient, that `samples` responses each attend to.

    The first forward through it stores the prompts (B rows); the second takes the responses (B * samples rows). A layer
    that is recomputed for its gradient comes by once more: `offset`, the slots before its input, says which of the two it is.
    """
    def __init__(self, samples: int):
        self.samples, self.length = samples, 0
        self.prompt: list[tuple[Tensor, Tensor]] = []

    def append(self, layer: int, k: Tensor, v: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        if not offset:
            if layer == len(self.prompt):
                self.prompt.append((k, v))
            return k, v
        prompt_k, prompt_v = (t.repeat_interleave(self.samples, dim=0) for t in self.prompt[layer])
        return torch.cat((prompt_k, k), dim=2), torch.cat((prompt_v, v), dim=2)


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.frequencies = rotary_frequencies(config)
        self.recompute = False          # gradient checkpointing: keep each layer's input only, run it again for its gradient

    @property
    def head(self) -> Tensor:
        """The vocabulary projection's weight, (V, D)."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def hidden(self, ids: Tensor, start: Tensor | None = None, cache=None, attention: int | None = None) -> Tensor:
        """ids (B, T) -> the last layer's normed states (B, T, D), or the raw ones after the attention of this layer.

        start (B,) is each row's first real slot; None says that no row is padded.
        """
        T, offset = ids.shape[1], cache.length if cache is not None else 0
        slots = torch.arange(offset + T, device=ids.device)
        query, mask = slots[offset:], None
        positions = query[None] if start is None else (query - start[:, None]).clamp(min=0)     # (B or 1, T)
        if start is not None or (offset and T > 1):
            first = torch.zeros(1, dtype=torch.long, device=ids.device) if start is None else start
            # A padding slot sees itself, so that no row of the softmax is empty.
            first = torch.minimum(first[:, None, None], query[None, :, None])                  # (B or 1, T, 1)
            mask = ((slots <= query[:, None]) & (slots >= first))[:, None]                     # (B or 1, 1, T, slots)
        x = self.embed_tokens(ids)
        angles = (positions[..., None] * self.frequencies.to(ids.device))[:, :, None]          # (B or 1, T, 1, d/2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        inputs = (cos, sin, mask, cache, offset)
        for layer in self.layers if attention is None else self.layers[:attention - 1]:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, *inputs)
        x = self.norm(x) if attention is None else self.layers[attention - 1].attend(x, *inputs)
        if cache is not None:
            cache.length += T
        return x

    def forward(self, ids: Tensor, start: Tensor | None = None, cache=None) -> Tensor:
        """ids (B, T) -> logits (B, T, V)."""
        return F.linear(self.hidden(ids, start, cache), self.head)

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: torch.dtype = torch.float32,
                        device: str | torch.device = "cpu") -> "Transformer":
        """Read a Hugging Face folder, or download one by its hub id. The weights come frozen."""
        folder = find_model_folder(path)
        config = ModelConfig.from_dict(read_json(folder / "config.json"), str(folder / "config.json"))
        with torch.device("meta"):                          # no memory until the real tensors arrive
            model = cls(config)
        missing = {checkpoint_name(name): name for name, _ in model.named_parameters()}
        for file in find_weight_files(folder):
            for key, tensor in read_tensors(file, missing).items():
                name = missing.pop(key)
                expected = model.get_parameter(name).shape
                if tensor.shape != expected or not tensor.is_floating_point():
                    raise ValueError(f"{file}: tensor {key} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                                     f"expected floating point of shape {tuple(expected)}")
                owner, _, leaf = name.rpartition(".")
                parameter = nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False)
                setattr(model.get_submodule(owner), leaf, parameter)
        if missing:
            raise ValueError(f"{folder}: {len(missing)} tensors are missing from its safetensors files, "
                             f"the first is {sorted(missing)[0]}")
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors as transformers does. Adapters must be merged first."""
        dtype = str(self.embed_tokens.weight.dtype).removeprefix("torch.")
        tensors = {checkpoint_name(name): p for name, p in self.named_parameters() if "lora_" not in name}
        write_tensors(Path(folder) / "model.safetensors", tensors)
        write_json(Path(folder) / "config.json", {**self.config.raw, "dtype": dtype})


def checkpoint_name(parameter: str) -> str:
    return parameter if parameter.startswith("lm_head") else "model." + parameter
