"""Decoding: one token of many rows at a time, which is most of what a rollout does.

Equal to `model.hidden`, token by token and up to rounding, and faster (bench.py says by how much). What it saves:

    weights      adapters are merged; q, k and v are one product, gate and up another, in pieces of a head or of up to
                 WIDTH outputs each: as a batch of small products a CPU gets through them up to one and a half times as fast
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
from model import Layer, SharedPrefix, Transformer, rms_norm

WIDTH = 288                             # outputs in a piece, at most; more if no number near it divides them


def pair(x: Tensor) -> Tensor:
    """(..., d): first half and second half -> pairs, each a complex number."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def fuse(projections: list[nn.Linear], width: int | None = None, paired: int = 0) -> tuple[Tensor, Tensor | None]:
    """Projections of the same input -> weights (pieces, in, width) with the adapters merged, and biases (pieces, 1, width)
    if they have them. In the pieces of the first `paired` projections, outputs stand in pairs."""
    first = projections[0]
    width = width or next(w for w in (*range(WIDTH, WIDTH // 2, -1), first.out_features) if first.out_features % w == 0)
    counts = [layer.out_features // width for layer in projections]
    weights = first.weight.new_empty(sum(counts), first.in_features, width)
    for number, (layer, part) in enumerate(zip(projections, weights.split(counts))):
        pieces = lora.merge(layer).t().unflatten(1, (-1, width)).transpose(0, 1)
        part.copy_(pair(pieces) if number < paired else pieces)
    if first.bias is None:
        return weights, None
    biases = [layer.bias.view(-1, 1, width) for layer in projections]
    return weights, torch.cat([pair(bias) if number < paired else bias for number, bias in enumerate(biases)])


def fuse_layer(layer: Layer) -> tuple:
    """q, k, v; the gains of q's and k's norms, if there are any; o; gate, up; down."""
    attention, mlp, gains = layer.self_attn, layer.mlp, None
    if attention.qk_norm:
        gains = torch.cat([pair(norm.weight).expand(projection.out_features // attention.head_dim, 1, -1) for norm, projection
                           in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj))])     # (heads + kv, 1, d)
    return (fuse([attention.q_proj, attention.k_proj, attention.v_proj], attention.head_dim, paired=2), gains,
            fuse([attention.o_proj]), fuse([mlp.gate_proj, mlp.up_proj]), fuse([mlp.down_proj]))


def project(x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    """x (n, in) -> (pieces, n, width)."""
    x = x.expand(len(weights), *x.shape)
    return torch.bmm(x, weights) if biases is None else torch.baddbmm(biases, x, weights)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x (n, D) + a projection y (pieces, n, width) of the same size."""
    return (x.unflatten(1, (len(y), -1)) + y.transpose(0, 1)).flatten(1)


class Decoder:
    """B prompts that `prefix` has read, `samples` responses each, up to `room` tokens long."""
    def __init__(self, model: Transformer, prefix: SharedPrefix, start: Tensor | None, samples: int, room: int):
        self.model, self.length = model, 0
        self.weights = [fuse_layer(layer) for layer in model.layers]
        # Queries and keys carry half of the attention's scale each, hence the fourth root.
        self.scale = model.config.head_dim ** -0.25
        self.prompt = [(pair(k) * self.scale, v) for k, v in prefix.prompt]                      # (B, kv, P, d) each
        B, kv, P, d = self.prompt[0][0].shape
        self.own = [k.new_empty(2, B, kv, samples, room, d) for k, _ in self.prompt]             # the responses' keys and values
        self.first = torch.full((B,), P, device=model.device) if start is None else P - start    # where responses begin
        self.mask, self.frequencies = None, model.frequencies.to(model.device)
        if start is not None:
            padding = torch.arange(P, device=model.device) < start[:, None]                      # (B, P)
            self.mask = self.own[0].new_zeros(B, 1, 1, P).masked_fill(padding[:, None, None], -torch.inf)

    def step(self, tokens: Tensor) -> Tensor:
        """The next token of every row (B, G) -> the last layer's normed states (B * G, D)."""
        positions = (self.first + self.length).repeat_interleave(tokens.shape[1])                # (n,)
        angles = positions[:, None] * self.frequencies                                           # (n, d/2)
        turn = torch.polar(torch.full_like(angles, self.scale), angles)
        self.length += 1
        x = self.model.embed_tokens(tokens.flatten())                                            # (n, D)
        for number, (layer, (qkv, gains, output, gate_up, down)) in enumerate(zip(self.model.layers, self.weights)):
            x = add(x, project(self.attend(number, project(layer.input_layernorm(x), *qkv), gains, turn), *output))
            gate, up = project(layer.post_attention_layernorm(x), *gate_up).chunk(2)             # (pieces, n, width) each
            x = add(x, project(F.silu(gate, inplace=True).mul_(up).transpose(0, 1).flatten(1), *down))
        return self.model.norm(x)

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
        own[:, :, :, :, T - 1] = heads[-2 * kv:].view(2, kv, B, G, d).transpose(1, 2)
        keys, values = own[:, :, :, :, :T].flatten(1, 3)                                         # (B * kv * G, T, d) each
        seen = torch.bmm(q, prompt_keys.flatten(0, 1).transpose(1, 2))                           # (B * kv, G * heads / kv, P)
        if self.mask is not None:
            seen = (seen.unflatten(0, (B, kv)) + self.mask).flatten(0, 1)
        said = torch.bmm(q.view(B * kv * G, -1, d), keys.transpose(1, 2)).view(B * kv, -1, T)
        weights = torch.cat((seen, said), dim=2).softmax(2)
        y = torch.bmm(weights[:, :, :P], prompt_values.flatten(0, 1)).view(B * kv * G, -1, d)
        y = y.baddbmm_(weights[:, :, P:].unflatten(1, (G, -1)).flatten(0, 1), values)
        return y.view(B, kv, G, -1).transpose(1, 2).reshape(B * G, -1)

    def keep(self, groups: Tensor, columns: Tensor) -> None:
        """Go on with these prompts (B',) and these of their responses (B', G')."""
        for number, own in enumerate(self.own):             # layer by layer: never two whole caches
            _, _, kv, _, room, d = own.shape
            self.own[number] = own.new_empty(2, len(groups), kv, columns.shape[1], room, d)
            kept = own[:, groups[:, None], :, columns, :self.length]                             # (B', G', 2, kv, T, d)
            self.own[number][..., :self.length, :] = kept.permute(2, 0, 3, 1, 4, 5)
            self.prompt[number] = tuple(part[groups] for part in self.prompt[number])
        self.first, self.mask = self.first[groups], None if self.mask is None else self.mask[groups]
