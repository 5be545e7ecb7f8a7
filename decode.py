"""Decoding: one token of many rows at a time, which is most of what a rollout does.

Equal to `model.hidden`, token by token and up to rounding, and faster (bench.py says by how much). What it saves:

    weights      adapters are merged, q, k and v are one matrix, gate and up another
    rotation     a head's two halves become one complex number, so that turning it is one product
    attention    a prompt's keys and values are kept and read once for all responses to it; a response's own stand in
                 room made beforehand; query heads that share a key are rows of one product, so keys are never repeated

The rows are a rectangle (B, G): response g to prompt b. It shrinks as responses end. Called by sample.generate.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

import lora
from model import SharedPrefix, Transformer


def fuse(*projections) -> tuple[Tensor, Tensor | None]:
    """Projections of the same input -> one matrix with the adapters merged, and one bias if they have it."""
    return lora.merge(projections), None if projections[0].bias is None else torch.cat([layer.bias for layer in projections])


def add(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + the projection of y."""
    return torch.addmm(x if bias is None else x + bias, y, weight.t())


def interleave(x: Tensor) -> Tensor:
    """(..., d): first half and second half -> pairs, the order in which view_as_real leaves queries and keys."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class Decoder:
    """B prompts that `prefix` has read, `samples` responses each, up to `room` tokens long."""
    def __init__(self, model: Transformer, prefix: SharedPrefix, start: Tensor | None, samples: int, room: int):
        self.model, self.length = model, 0
        self.weights = [(fuse(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj), fuse(layer.self_attn.o_proj),
                         fuse(layer.mlp.gate_proj, layer.mlp.up_proj), fuse(layer.mlp.down_proj)) for layer in model.layers]
        # Queries and keys carry half of the attention's scale each, hence the fourth root.
        self.scale = model.config.head_dim ** -0.25
        self.prompt = [(interleave(k) * self.scale, v) for k, v in prefix.prompt]                # (B, kv, P, d) each
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
        angles = positions[:, None, None] * self.frequencies                                     # (n, 1, d/2)
        turn = torch.polar(torch.full_like(angles, self.scale), angles)
        self.length += 1
        x = self.model.embed_tokens(tokens.flatten())                                            # (n, D)
        for number, (layer, (qkv, output, gate_up, down)) in enumerate(zip(self.model.layers, self.weights)):
            heads = F.linear(layer.input_layernorm(x), *qkv).unflatten(1, (-1, layer.self_attn.head_dim))     # (n, heads + 2 kv, d)
            x = add(x, self.attend(number, heads, turn), *output)
            gate, up = F.linear(layer.post_attention_layernorm(x), *gate_up).chunk(2, dim=1)
            x = add(x, F.silu(gate).mul_(up), *down)
        return self.model.norm(x)

    def attend(self, number: int, heads: Tensor, turn: Tensor) -> Tensor:
        """Each row's new query over its prompt and its own tokens: (n, heads + 2 kv, d) -> (n, heads * d)."""
        attention, own, (prompt_keys, prompt_values) = self.model.layers[number].self_attn, self.own[number], self.prompt[number]
        (_, B, kv, G, _, d), P, T = own.shape, prompt_keys.shape[2], self.length
        qk, v = heads[:, :-kv], heads[:, -kv:]
        if attention.qk_norm:
            qk = torch.cat((attention.q_norm(qk[:, :-kv]), attention.k_norm(qk[:, -kv:])), dim=1)
        qk = torch.view_as_real(torch.complex(*qk.float().chunk(2, dim=2)) * turn).flatten(2).to(v.dtype)
        q = qk[:, :-kv].view(B, G, kv, -1, d).transpose(1, 2).reshape(B * kv, -1, d)             # (B * kv, G * heads / kv, d)
        for store, new in zip(own, (qk[:, -kv:], v)):
            store[:, :, :, T - 1] = new.unflatten(0, (B, G)).transpose(1, 2)
        keys, values = own[:, :, :, :, :T].flatten(1, 3)                                         # (B * kv * G, T, d) each
        seen = torch.bmm(q, prompt_keys.flatten(0, 1).transpose(1, 2))                           # (B * kv, G * heads / kv, P)
        if self.mask is not None:
            seen = (seen.unflatten(0, (B, kv)) + self.mask).flatten(0, 1)
        said = torch.bmm(q.reshape(B * kv * G, -1, d), keys.transpose(1, 2)).view(B * kv, -1, T)
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
