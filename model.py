"""The decoder: one hand-written transformer for the Qwen2, Qwen3 and Llama families.

    x = embed(ids)
    x = x + attention(norm(x))
    x = x + mlp(norm(x))                both lines once per layer
    logits = head(norm(x))

Modules carry Hugging Face's names, so a checkpoint's tensors go straight to the parameters they
name and adapters are saved under the names that PEFT expects. The families differ in four
switches: a bias on the projections, a norm on queries and keys, stretched wavelengths (Llama 3),
and whether the head shares the embedding's weight.

Batches are padded on the left. Row b's text begins at slot start[b]: slot i has position i - start
and sees slot j when start <= j <= i. The same rule serves whole sequences and responses that
continue a prompt. Everything here is written as in a textbook; support/fast.py has faster twins of
these modules.
"""
import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support import files, hub
from support.hub import ModelConfig


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) in fp32, then times weight in x's own type."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """theta^(-2i/d), (d/2,). Llama 3 stretches the long wavelengths."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / config.rope_theta ** (exponents / config.head_dim)
    if config.rope_llama3:
        factor, low, high, context = config.rope_llama3
        turns = context * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: kept; 0: divided by factor
        frequencies = keep * frequencies + (1 - keep) * frequencies / factor
    return frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) by its position's angle.

    x (B, T, heads, d); cos, sin (B or 1, T, 1, d/2).
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """softmax(q k / sqrt(d)) v for each head; several query heads may share a key head."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.kv_heads = config.kv_heads
        self.shared_kv = config.kv_heads < config.heads
        self.qk_norm = config.qk_norm
        size = config.hidden_size
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, prefix,
                offset: int) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, heads, d)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, kv_heads, d)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, (kv_)heads, T, d)
        if prefix is not None:
            k, v = prefix.extend(self.layer, k, v, offset)  # (B, kv_heads, offset + T, d)
        causal = mask is None and x.shape[1] > 1
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal,
                                           enable_gqa=self.shared_kv)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        sizes = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(*sizes, bias=config.mlp_bias)
        self.up_proj = nn.Linear(*sizes, bias=config.mlp_bias)
        self.down_proj = nn.Linear(*reversed(sizes), bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, *context) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *context)
        return x + self.mlp(self.post_attention_layernorm(x))


class SharedPrefix:
    """Keys and values of B prompts, with their gradient, that `samples` responses each attend to.

    The first pass through it stores the prompts (B rows), the next ones read the responses
    (B * samples rows). `offset`, the number of slots before a layer's input, tells the two apart.
    """

    def __init__(self, samples: int):
        self.samples = samples
        self.prompts: list[tuple[Tensor, Tensor]] = []  # per layer, (B, kv_heads, P, d) each

    @property
    def length(self) -> int:
        """Slots of a prompt; 0 before the prompts were read."""
        return self.prompts[0][0].shape[2] if self.prompts else 0

    def extend(self, layer: int, k: Tensor, v: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        if not offset:
            if layer == len(self.prompts):  # a layer that is recomputed comes by once more
                self.prompts.append((k, v))
            return k, v
        prompt_k, prompt_v = self.prompts[layer]
        k = torch.cat((prompt_k.repeat_interleave(self.samples, dim=0), k), dim=2)
        v = torch.cat((prompt_v.repeat_interleave(self.samples, dim=0), v), dim=2)
        return k, v


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.frequencies = rotary_frequencies(config)
        self.recompute = False  # gradient checkpointing: keep each layer's input, run it again

    @property
    def head(self) -> Tensor:
        """The weight of the vocabulary projection, (V, D)."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def embed(self, ids: Tensor, start: Tensor | None = None, prefix: SharedPrefix | None = None):
        """ids (B, T) -> x (B, T, D) and what every layer needs beside it: rotation, mask, prefix.

        start (B,) is each prompt's first real slot; None says that no row is padded.
        """
        T = ids.shape[1]
        offset = 0 if prefix is None else prefix.length
        if start is not None and offset:
            start = start.repeat_interleave(prefix.samples)  # a response's row is its prompt's
        slots = torch.arange(offset + T, device=ids.device)  # of the prompt and of ids
        own = slots[offset:]  # of ids alone
        first = slots.new_zeros(1) if start is None else start  # each row's first real slot
        positions = (own - first[:, None]).clamp(min=0)  # (B or 1, T)
        mask = None  # nothing is hidden but what comes later
        if start is not None or (offset and T > 1):
            # A padding slot sees itself, so that no row of the softmax is empty.
            visible = torch.minimum(first[:, None, None], own[None, :, None])  # (B or 1, T, 1)
            mask = ((slots <= own[:, None]) & (slots >= visible))[:, None]  # (B or 1, 1, T, slots)
        x = self.embed_tokens(ids)
        angles = (positions[..., None] * self.frequencies.to(ids.device))[:, :, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)  # (B or 1, T, 1, d/2)
        return x, (cos, sin, mask, prefix, offset)

    def hidden(self, ids: Tensor, start: Tensor | None = None,
               prefix: SharedPrefix | None = None) -> Tensor:
        """ids (B, T) -> the last layer's normed states (B, T, D)."""
        x, context = self.embed(ids, start, prefix)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, *context, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, *context)
        return self.norm(x)

    def forward(self, ids: Tensor, start: Tensor | None = None) -> Tensor:
        """ids (B, T) -> logits (B, T, V)."""
        return F.linear(self.hidden(ids, start), self.head)

    def logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """hidden (n, D), targets (n,) -> the log-probability of each target (n,), in fp32."""
        logits = F.linear(hidden, self.head).float() / temperature  # (n, V)
        return F.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: torch.dtype = torch.float32,
                        device: str | torch.device = "cpu") -> "Transformer":
        """Read a Hugging Face folder, or download one by its hub id. The weights come frozen."""
        folder = hub.find_model_folder(path)
        config = ModelConfig.from_dict(files.read_json(folder / "config.json"),
                                       str(folder / "config.json"))
        with torch.device("meta"):  # no memory until the real tensors arrive
            model = cls(config)
        names = {checkpoint_name(name): name for name, _ in model.named_parameters()}
        hub.load_weights(model, names, folder, dtype, device)
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors as transformers does. Merge adapters first."""
        dtype = str(self.embed_tokens.weight.dtype).removeprefix("torch.")
        tensors = {checkpoint_name(name): parameter for name, parameter in self.named_parameters()
                   if "lora_" not in name}
        for name, tensor in tensors.items():
            files.require_finite(name, tensor, str(folder))
        files.write_tensors(Path(folder) / "model.safetensors", tensors)
        files.write_json(Path(folder) / "config.json", {**self.config.raw, "dtype": dtype})


def checkpoint_name(parameter: str) -> str:
    """The name that transformers gives a parameter in its files."""
    return parameter if parameter.startswith("lm_head") else "model." + parameter
