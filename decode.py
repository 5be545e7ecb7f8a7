"""Decoding: one token of many rows at a time, which is most of what a rollout does.

Equal to the model's own forward pass, token by token and up to rounding, and faster (bench.py says by how much). What it saves:

    weights      adapters are merged; q, k and v are one product, by heads, gate and up another; on a CPU the others, the head of
                 the model too, are cut into pieces: as a batch of small products, with the weights as they are stored, they take
                 about two thirds of the time that a whole one takes for a few rows
    rotation     rows of the q and k weights are reordered so that a pair to be turned is one complex number
    attention    a prompt's keys and values are kept and read once for all responses to it; a response's own stand in
                 room made beforehand; query heads that share a key are rows of one product, so keys are never repeated

The rows are a rectangle (B, G): response g to prompt b. It shrinks as responses end. Called by sample.generate.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import lora
from model import Attention, Layer, SharedPrefix, Transformer, rms_norm

WIDTH = 128                             # outputs in a piece on a CPU, if a number not far below it divides them


def pair(x: Tensor, dim: int = -1) -> Tensor:
    """Along this dimension, first half and second half -> pairs, each a complex number."""
    return x.unflatten(dim, (2, -1)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def width_of(weight: Tensor) -> int:
    """How many of its outputs (out, in) make a piece: all of them, but on a CPU at most WIDTH if that divides well."""
    choices = range(WIDTH, WIDTH // 4, -1) if weight.device.type == "cpu" else ()
    return next((width for width in choices if len(weight) % width == 0), len(weight))


def fuse(*projections: nn.Linear, width: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Projections of the same input -> their weights (pieces, width, in) with the adapters merged, and their biases
    (pieces, 1, width) if they have any. A single one without an adapter is a view of its parameter: to be read only."""
    weights, biases = [lora.merge(layer) for layer in projections], [layer.bias for layer in projections]
    pieces = (-1, width or width_of(weights[0]))
    weights = (torch.cat(weights) if weights[1:] else weights[0]).unflatten(0, pieces)
    return weights, None if biases[0] is None else torch.cat(biases).unflatten(0, pieces)[:, None]


def fuse_heads(attention: Attention) -> tuple[tuple[Tensor, Tensor | None], Tensor | None]:
    """q, k and v by heads: (weights (heads + 2 kv, d, in), biases (heads + 2 kv, 1, d)), and gains (heads + kv, 1, d) of q's and
    k's norms. What is to be turned, all but v, stands in pairs."""
    d, kv, gains = attention.head_dim, attention.kv_heads, None
    weights, biases = fuse(attention.q_proj, attention.k_proj, attention.v_proj, width=d)
    weights[:-kv] = pair(weights[:-kv], -2)
    if biases is not None:
        biases[:-kv] = pair(biases[:-kv])
    if attention.qk_norm:
        gains = torch.cat([pair(norm.weight).expand(count, 1, d) for norm, count in
                           ((attention.q_norm, len(weights) - 2 * kv), (attention.k_norm, kv))])
    return (weights, biases), gains


def fuse_layer(layer: Layer) -> tuple:
    """The norms and the weights, in the order in which `step` takes them."""
    return (layer.input_layernorm, fuse_heads(layer.self_attn), fuse(layer.self_attn.o_proj),
            layer.post_attention_layernorm, fuse(layer.mlp.gate_proj, layer.mlp.up_proj), fuse(layer.mlp.down_proj))


def project(x: Tensor, weights: Tensor, biases: Tensor | None = None) -> Tensor:
    """x (n, in) -> (pieces, n, width)."""
    y = torch.bmm(x.expand(len(weights), -1, -1), weights.transpose(1, 2))
    return y if biases is None else y.add_(biases)


def join(y: Tensor) -> Tensor:
    """A projection in pieces (pieces, n, width) -> rows (n, out)."""
    return y.transpose(0, 1).flatten(1)


class Decoder:
    """B prompts that `prefix` has read, `samples` responses each, up to `room` tokens long."""
    def __init__(self, model: Transformer, prefix: SharedPrefix, start: Tensor | None, samples: int, room: int):
        self.model, self.length = model, 0
        self.weights = [fuse_layer(layer) for layer in model.layers]
        self.head = model.head.unflatten(0, (-1, width_of(model.head)))                          # (pieces, width, D)
        # Queries and keys carry half of the attention's scale each, hence the fourth root.
        self.scale = model.config.head_dim ** -0.25
        self.prompt = [(pair(k * self.scale).flatten(0, 1).transpose(1, 2), v.flatten(0, 1)) for k, v in prefix.prompt]
        B, kv, P, d = prefix.prompt[0][0].shape                         # hence (B * kv, d, P) and (B * kv, P, d)
        self.own = [v.new_empty(2, B, kv, samples, room, d) for _, v in self.prompt]             # the responses' keys and values
        self.first = torch.full((B,), P, device=model.device) if start is None else P - start    # where responses begin
        self.mask, self.frequencies = None, model.frequencies.to(model.device)
        if start is not None:
            padding = torch.arange(P, device=model.device) < start[:, None]                      # (B, P)
            self.mask = self.own[0].new_zeros(B, 1, 1, P).masked_fill(padding[:, None, None], -torch.inf)

    def step(self, tokens: Tensor) -> Tensor:
        """The next token of every row (B, G) -> logits (B * G, V)."""
        positions = (self.first + self.length).repeat_interleave(tokens.shape[1])                # (n,)
        angles = positions[:, None] * self.frequencies                                           # (n, d/2)
        turn = torch.polar(torch.full_like(angles, self.scale), angles)
        self.length += 1
        x = self.model.embed_tokens(tokens.flatten())                                            # (n, D)
        for number, (before, (qkv, gains), output, after, gate_up, down) in enumerate(self.weights):
            x = x + join(project(self.attend(number, project(before(x), *qkv), gains, turn), *output))
            gate, up = project(after(x), *gate_up).chunk(2)                             # (pieces, n, width) each
            x = x + join(project(join(F.silu(gate, inplace=True).mul_(up)), *down))
        return join(project(self.model.norm(x), self.head))

    def attend(self, number: int, heads: Tensor, gains: Tensor | None, turn: Tensor) -> Tensor:
        """Each row's new query over its prompt and its own tokens: (heads + 2 kv, n, d) -> (n, heads * d)."""
        own, (prompt_keys, prompt_values) = self.own[number], self.prompt[number]
        (_, B, kv, G, _, d), P, T, dtype = own.shape, prompt_keys.shape[2], self.length, heads.dtype
        if gains is not None:
            heads[:-kv] = rms_norm(heads[:-kv], gains, self.model.config.norm_eps)[0]
        heads = heads.float()
        torch.view_as_complex(heads[:-kv].unflatten(2, (-1, 2))).mul_(turn)                      # the queries and the keys
        heads = heads.to(dtype)
        q = heads[:-2 * kv].view(kv, -1, B, G, d).permute(2, 0, 3, 1, 4).reshape(B * kv, -1, d)  # (B * kv, G * heads / kv, d)
        own.select(4, T - 1).copy_(heads[-2 * kv:].view(2, kv, B, G, d).transpose(1, 2))
        keys, values = own.narrow(4, 0, T).flatten(1, 3)                                         # (B * kv * G, T, d) each
        seen = torch.bmm(q, prompt_keys)                                                         # (B * kv, G * heads / kv, P)
        if self.mask is not None:
            seen = (seen.unflatten(0, (B, kv)) + self.mask).flatten(0, 1)
        said = torch.bmm(q.view(B * kv * G, -1, d), keys.transpose(1, 2)).view(B * kv, -1, T)
        weights = torch.cat((seen, said), dim=2).softmax(2)
        y = torch.bmm(weights.narrow(2, 0, P), prompt_values).view(B * kv * G, -1, d)
        y.baddbmm_(weights.narrow(2, P, T).reshape(B * kv * G, -1, T), values)
        return y.view(B, kv, G, -1).transpose(1, 2).reshape(B * G, -1)

    def keep(self, groups: Tensor, columns: Tensor) -> None:
        """Go on with these prompts (B',) and these of their responses (B', G')."""
        for number, own in enumerate(self.own):             # layer by layer: never two whole caches
            _, _, kv, _, room, d = own.shape
            self.own[number] = own.new_empty(2, len(groups), kv, columns.shape[1], room, d)
            kept = own[:, groups[:, None], :, columns, :self.length]                             # (B', G', 2, kv, T, d)
            self.own[number][..., :self.length, :] = kept.permute(2, 0, 3, 1, 4, 5)
            self.prompt[number] = tuple(part.unflatten(0, (-1, kv))[groups].flatten(0, 1) for part in self.prompt[number])
        self.first, self.mask = self.first[groups], None if self.mask is None else self.mask[groups]
