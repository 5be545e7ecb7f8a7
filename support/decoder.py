"""Sampling sooner: the twin of sample.Decoder, one token of many rows at a time.

    weights    adapters merged; q, k, v one product by heads, gate and up another; on a CPU cut into
               pieces, which as a batch take two thirds of the time
    rotation   q and k weights are reordered so that a pair is one complex number
    attention  a prompt's keys are read once for all responses to it; query heads that share a key
               are rows of one product
    rows       a rectangle (B, G), response g to prompt b, which shrinks as responses end
    drawing    first the block of the vocabulary, then the token: short fp64 sums
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import lora
import sample
from model import Attention, Layer, SharedPrefix, Transformer
from sample import pad_left

# A CPU cuts a product into equal pieces of at most PIECE outputs, and of more than PIECE / 4.
PIECE = 128
BLOCK = 128  # tokens of the vocabulary that are summed at a time


def sample_token(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """sample.sample_token in two levels: the block of the vocabulary, then the token in it."""
    if temperature == 0:
        return sample.sample_token(logits, temperature, uniform)
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    probabilities = F.softmax(logits, dim=-1)
    padding = -logits.shape[1] % BLOCK
    blocks = F.pad(probabilities, (0, padding)) if padding else probabilities
    blocks = blocks.unflatten(1, (-1, BLOCK))  # (n, V / BLOCK, BLOCK)
    sums = blocks.sum(2).to(uniform.dtype)
    total = sums.sum(1, keepdim=True)
    block, rest = find_place(sums, uniform[:, None] * total)
    row = torch.arange(len(blocks), device=block.device)
    token, _ = find_place(blocks[row, block[:, 0]].to(uniform.dtype), rest)
    tokens = (block * BLOCK + token).clamp(max=logits.shape[1] - 1)
    return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log()


def find_place(weights: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """weights (n, K) laid end to end, place (n, 1) -> the weight there, and the place in it."""
    ends = weights.cumsum(1)
    last = ends[:, -1:].nextafter(torch.zeros_like(place))  # never a weight of zero
    place = torch.minimum(place.clamp(min=0), last)
    index = torch.searchsorted(ends, place, right=True).clamp(max=weights.shape[1] - 1)
    return index, place - (ends - weights).gather(1, index)


def to_pairs(x: Tensor, dim: int = -1) -> Tensor:
    """Along this dimension, first and second half -> pairs, each to be one complex number."""
    return x.unflatten(dim, (2, -1)).transpose(dim - 1, dim).flatten(dim - 1, dim)


def piece_width(weight: Tensor) -> int:
    """How many outputs of a weight (out, in) make a piece: all, but on a CPU at most PIECE."""
    widths = range(PIECE, PIECE // 4, -1) if weight.device.type == "cpu" else ()
    return next((width for width in widths if len(weight) % width == 0), len(weight))


def fuse(*projections: nn.Linear, width: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Projections of one input -> merged weights (pieces, width, in), biases (pieces, 1, width)."""
    weights = [lora.merge(layer) for layer in projections]
    pieces = (-1, width or piece_width(weights[0]))
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    biases = [layer.bias for layer in projections]
    bias = None if biases[0] is None else torch.cat(biases).unflatten(0, pieces)[:, None]
    return weight.unflatten(0, pieces), bias


def fuse_heads(attention: Attention) -> tuple[tuple[Tensor, Tensor | None], Tensor | None]:
    """q, k, v by heads: (weights (heads + 2 kv, d, in), biases), and gains of q's and k's norms.

    What is rotated, all but v, is reordered into pairs.
    """
    d, kv = attention.head_dim, attention.kv_heads
    weights, biases = fuse(attention.q_proj, attention.k_proj, attention.v_proj, width=d)
    weights[:-kv] = to_pairs(weights[:-kv], -2)
    if biases is not None:
        biases[:-kv] = to_pairs(biases[:-kv])
    gains = None
    if attention.qk_norm:
        q_gain = to_pairs(attention.q_norm.weight).expand(len(weights) - 2 * kv, 1, d)
        k_gain = to_pairs(attention.k_norm.weight).expand(kv, 1, d)
        gains = torch.cat((q_gain, k_gain))
    return (weights, biases), gains


class FusedLayer:
    """A layer's norms, and its weights as `Decoder` multiplies them."""

    def __init__(self, layer: Layer):
        self.attention_norm = layer.input_layernorm
        self.mlp_norm = layer.post_attention_layernorm
        self.qkv, self.gains = fuse_heads(layer.self_attn)
        self.output = fuse(layer.self_attn.o_proj)
        self.gate_up = fuse(layer.mlp.gate_proj, layer.mlp.up_proj)
        self.down = fuse(layer.mlp.down_proj)


def project(x: Tensor, weights: Tensor, biases: Tensor | None = None) -> Tensor:
    """x (n, in) -> (pieces, n, width)."""
    if x.device.type != "cpu":
        y = F.linear(x, weights.flatten(0, 1), None if biases is None else biases.flatten())
        return y.unflatten(1, weights.shape[:2]).transpose(0, 1)
    y = torch.bmm(x.expand(len(weights), -1, -1), weights.transpose(1, 2))
    return y if biases is None else y.add_(biases)


def join_pieces(y: Tensor) -> Tensor:
    """(pieces, n, width) -> (n, out)."""
    return y.transpose(0, 1).flatten(1)


class Decoder:
    """Logits after one more token of every row, and rows that leave as they end."""
    sample_token = staticmethod(sample_token)

    def __init__(self, model: Transformer, prompts: list[list[int]], samples: int, room: int):
        device = model.device
        prefix = SharedPrefix(samples)
        prompt_ids, start = pad_left(prompts, device)
        last = model.hidden(prompt_ids, start, prefix)[:, -1]
        self.logits = F.linear(last, model.head).repeat_interleave(samples, dim=0)
        self.model = model
        self.length = 0
        self.rectangle = torch.arange(len(self.logits), device=device).view(-1, samples)  # (B, G)
        self.layers = [FusedLayer(layer) for layer in model.layers]
        self.head = model.head.unflatten(0, (-1, piece_width(model.head)))  # (pieces, width, D)
        # Queries and keys carry half of the attention's scale each, hence the fourth root.
        self.scale = model.config.head_dim ** -0.25
        self.frequencies = model.frequencies.to(device)
        B, kv, P, d = prefix.prompts[0][0].shape
        self.prompts = [(to_pairs(k * self.scale).flatten(0, 1).transpose(1, 2), v.flatten(0, 1))
                        for k, v in prefix.prompts]  # (B * kv, d, P) and (B * kv, P, d)
        self.own = [v.new_empty(2, B, kv, samples, room, d) for _, v in self.prompts]
        self.first = torch.full((B,), P, device=device) if start is None else P - start
        self.mask = None
        if start is not None:
            padding = torch.arange(P, device=device) < start[:, None]  # (B, P)
            mask = self.own[0].new_zeros(B, 1, 1, P)
            self.mask = mask.masked_fill(padding[:, None, None], -torch.inf)

    @property
    def rows(self) -> Tensor:
        return self.rectangle.flatten()

    def step(self, tokens: Tensor, finished: Tensor | None) -> None:
        """Append one token per row (n,), let rows that have ended leave, compute the logits."""
        if finished is not None:
            tokens = self.drop_finished(tokens, finished)  # (n,)
        positions = (self.first + self.length).repeat_interleave(self.rectangle.shape[1])  # (n,)
        angles = positions[:, None] * self.frequencies  # (n, d/2)
        rotation = torch.polar(torch.full_like(angles, self.scale), angles)
        self.length += 1
        x = self.model.embed_tokens(tokens)  # (n, D)
        for number, layer in enumerate(self.layers):
            heads = project(layer.attention_norm(x), *layer.qkv)
            y = self.attend(number, heads, layer.gains, rotation)
            x = x + join_pieces(project(y, *layer.output))
            gate, up = project(layer.mlp_norm(x), *layer.gate_up).chunk(2)
            y = join_pieces(F.silu(gate, inplace=True).mul_(up))
            x = x + join_pieces(project(y, *layer.down))
        self.logits = join_pieces(project(self.model.norm(x), self.head))

    def attend(self, number: int, heads: Tensor, gains: Tensor | None, rotation: Tensor) -> Tensor:
        """Queries over prompts and own tokens: (heads + 2 kv, n, d) -> (n, heads * d)."""
        own = self.own[number]
        prompt_keys, prompt_values = self.prompts[number]
        _, B, kv, G, _, d = own.shape
        P, T, dtype = prompt_keys.shape[2], self.length, heads.dtype
        if gains is not None:
            eps = self.model.config.norm_eps
            normed = F.rms_norm(heads[:-kv].float(), (d,), None, eps)
            heads[:-kv] = normed.to(dtype) * gains
        heads = heads.float()
        torch.view_as_complex(heads[:-kv].unflatten(2, (-1, 2))).mul_(rotation)  # queries and keys
        heads = heads.to(dtype)
        # Query heads that share a key are rows of one product, so keys are never repeated.
        q = heads[:-2 * kv].view(kv, -1, B, G, d).permute(2, 0, 3, 1, 4)
        q = q.reshape(B * kv, -1, d)  # (B * kv, G * heads / kv, d)
        own.select(4, T - 1).copy_(heads[-2 * kv:].view(2, kv, B, G, d).transpose(1, 2))
        keys, values = own.narrow(4, 0, T).flatten(1, 3)  # (B * kv * G, T, d) each
        to_prompt = torch.bmm(q, prompt_keys)  # (B * kv, G * heads / kv, P)
        if self.mask is not None:
            to_prompt = (to_prompt.unflatten(0, (B, kv)) + self.mask).flatten(0, 1)
        to_own = torch.bmm(q.view(B * kv * G, -1, d), keys.transpose(1, 2)).view(B * kv, -1, T)
        weights = torch.cat((to_prompt, to_own), dim=2).softmax(2)
        y = torch.bmm(weights.narrow(2, 0, P), prompt_values).view(B * kv * G, -1, d)
        y.baddbmm_(weights.narrow(2, P, T).reshape(B * kv * G, -1, T), values)
        return y.view(B, kv, G, -1).transpose(1, 2).reshape(B * G, -1)

    def drop_finished(self, tokens: Tensor, finished: Tensor) -> Tensor:
        """Shrink the rectangle to the smallest that holds all living rows -> the tokens that stay.

        Finished groups leave, and of the others as many responses as the largest still needs.
        """
        alive = ~finished[self.rectangle]  # (B, G)
        counts = alive.sum(1)
        groups = counts.nonzero()[:, 0]
        columns = (~alive[groups]).long().argsort(dim=1, stable=True)[:, :int(counts.max())]
        if columns.numel() == self.rectangle.numel():
            return tokens
        tokens = tokens.view_as(self.rectangle)[groups].gather(1, columns).flatten()
        self.keep(groups, columns)
        return tokens

    def keep(self, groups: Tensor, columns: Tensor) -> None:
        """Go on with these prompts (B',) and these of their responses (B', G')."""
        self.rectangle = self.rectangle[groups].gather(1, columns)
        for number, own in enumerate(self.own):  # layer by layer: never two whole caches
            _, _, kv, _, room, d = own.shape
            kept = own[:, groups[:, None], :, columns, :self.length]  # (B', G', 2, kv, T, d)
            self.own[number] = own.new_empty(2, len(groups), kv, columns.shape[1], room, d)
            self.own[number][..., :self.length, :] = kept.permute(2, 0, 3, 1, 4, 5)
            self.prompts[number] = tuple(part.unflatten(0, (-1, kv))[groups].flatten(0, 1)
                                         for part in self.prompts[number])
        self.first = self.first[groups]
        self.mask = None if self.mask is None else self.mask[groups]
