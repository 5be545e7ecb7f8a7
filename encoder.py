"""The frozen encoder: token states, mean-pooled over a query, over a response, and over both.

By default the encoder is the policy's own base model, adapters off: the residual stream after the attention of an early
layer, before its MLP. When the KL penalty runs its reference pass, the states are tapped from that pass; otherwise only
what lies below the tap runs, once a prompt and once a response. Measured on Countdown, the first layer shows strategies
best: higher up, the numbers of the problem drown them. With `--encoder`, a sentence encoder reads the texts instead, as
in the paper.

Called by strategy.Strategist once a step; its output carries no gradient.
"""
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

import lora
import parallel
from model import SharedPrefix, Transformer
from sample import Rollout, pad_left


@dataclass
class Features:
    """Mean-pooled states of B problems with G responses each; the two views are means over random halves."""
    query: Tensor       # (B, D)
    response: Tensor    # (B, G, D)
    views: Tensor       # (B, G, 2, D)
    both: Tensor        # (B, G, D) query and response together


class Tap:
    """Collect a layer's states after its attention while the model runs: a reference pass that doubles as the encoder."""
    def __init__(self, model: Transformer, layer: int):
        self.module, self.states = model.layers[layer - 1].post_attention_layernorm, []

    def __enter__(self):
        self.handle = self.module.register_forward_pre_hook(lambda module, inputs: self.states.append(inputs[0]))
        return self

    def __exit__(self, *error):
        self.handle.remove()


def pool(states: Tensor, weights: Tensor) -> Tensor:
    """states (n, T, D), weights (n, T) -> weighted mean (n, D) in fp32; zero where all weights are."""
    weights = weights.float()
    return torch.einsum("ntd,nt->nd", states.float(), weights) / weights.sum(1, keepdim=True).clamp(min=1)


def halves(ids: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    """ids, mask (n, T) -> (n, 2, T): a random half of each row's tokens, and the rest.

    All copies of a token fall into the same half: what the halves share is then no single number or word but the way
    in which a response goes. A half that would be empty is the whole row.
    """
    kinds, kind = ids.unique(return_inverse=True)
    coin = torch.rand(len(ids), len(kinds), generator=generator).to(ids.device).gather(1, kind)  # (n, T)
    parts = torch.stack((mask & (coin < 0.5), mask & (coin >= 0.5)), dim=1)
    return torch.where(parts.any(2, keepdim=True), parts, mask[:, None])


def features(query_states: Tensor, query_mask: Tensor, response_states: Tensor, response_mask: Tensor, parts: Tensor) -> Features:
    """Token states of B queries and B * G responses, and the responses' halves (B * G, 2, T) -> their pooled features."""
    B, G = len(query_states), len(response_states) // len(query_states)
    query, response = pool(query_states, query_mask), pool(response_states, response_mask)
    views = torch.stack([pool(response_states, half) for half in parts.unbind(1)], dim=1)
    q, r = query_mask.sum(1).repeat_interleave(G)[:, None], response_mask.sum(1)[:, None]        # token counts
    both = (query.repeat_interleave(G, 0) * q + response * r) / (q + r).clamp(min=1)
    return Features(query, response.unflatten(0, (B, G)), views.unflatten(0, (B, G)), both.unflatten(0, (B, G)))


def join(parts: list[Features]) -> Features:
    return Features(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Features)))


def gather(batch: Features) -> Features:
    """Every rank's features, in the order of the whole batch."""
    return Features(*map(parallel.gather, vars(batch).values()))


@torch.no_grad()
def base_features(model: Transformer, prompts: list[list[int]], rollout: Rollout, layer: int, micro_batch: int,
                  generator: torch.Generator, tapped: list[Tensor] | None = None) -> Features:
    """Features from the policy's base model. `tapped`: the states of a reference pass over the same micro-batches.

    A response's last token, nearly always the end token, is never read by the model and not pooled.
    """
    parts, samples, mask = [], len(rollout.ids) // len(prompts), rollout.mask()[:, 1:]           # (N, T - 1)
    views = halves(rollout.ids[:, :-1], mask, generator)    # of all at once: the same whatever the micro-batches
    for number, b in enumerate(range(0, len(prompts), micro_batch)):
        rows = slice(b * samples, (b + micro_batch) * samples)
        prompt_ids, start = pad_left(prompts[b:b + micro_batch], rollout.ids.device)
        slots = torch.arange(prompt_ids.shape[1], device=prompt_ids.device)
        prompt_mask = slots >= (0 if start is None else start[:, None]) + torch.zeros_like(prompt_ids[:, :1])
        if tapped is None:
            prefix, starts = SharedPrefix(samples), None if start is None else start.repeat_interleave(samples)
            with lora.disabled(model):
                states = [model.hidden(prompt_ids, start, prefix, layer),
                          model.hidden(rollout.ids[rows, :-1], starts, prefix, layer)]
        else:
            states = tapped[2 * number:2 * number + 2]
        parts.append(features(states[0], prompt_mask, states[1], mask[rows], views[rows]))
    return join(parts)


class SentenceEncoder:
    """A frozen sentence encoder (the paper's is all-MiniLM-L6-v2) through transformers."""
    def __init__(self, name: str, device: torch.device, batch: int = 64):
        from transformers import AutoModel, AutoTokenizer
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            self.model = AutoModel.from_pretrained(name, trust_remote_code=False, use_safetensors=True)     # never a pickle
            self.model.train(False).requires_grad_(False).to(device)
            self.device, self.batch = device, batch
            self.limit = min(self.tokenizer.model_max_length, getattr(self.model.config, "max_position_embeddings", 512))
            self.mean(["one", "one text and another"])      # does it pad?
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:                          # transformers raises whatever its readers raise
            raise ValueError(f"--encoder {name} cannot be used ({type(error).__name__}): expected a folder or hub id "
                             "of a sentence encoder") from None

    @torch.no_grad()
    def states(self, texts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """-> token states (n, T, D), ids and mask (n, T)."""
        parts = []
        for i in range(0, len(texts), self.batch):
            inputs = self.tokenizer(texts[i:i + self.batch], padding=True, truncation=True, max_length=self.limit,
                                    return_tensors="pt").to(self.device)
            parts.append((self.model(**inputs).last_hidden_state, inputs["input_ids"], inputs["attention_mask"].bool()))
        width = max(mask.shape[1] for _, _, mask in parts)
        return (torch.cat([F.pad(states, (0, 0, 0, width - states.shape[1])) for states, _, _ in parts]),
                *(torch.cat([F.pad(part[i], (0, width - part[i].shape[1])) for part in parts]) for i in (1, 2)))

    def mean(self, texts: list[str]) -> Tensor:
        """(n, D): the mean over real tokens."""
        states, _, mask = self.states(texts)
        return pool(states, mask)

    def features(self, queries: list[str], responses: list[str], generator: torch.Generator) -> Features:
        """The same four poolings as from the base model; query and response together are encoded as one text."""
        (query_states, _, query_mask), (states, ids, mask) = self.states(queries), self.states(responses)
        found = features(query_states, query_mask, states, mask, halves(ids, mask, generator))
        G = len(responses) // len(queries)
        together = [f"{queries[n // G]} {response}" for n, response in enumerate(responses)]
        found.both = self.mean(together).view_as(found.response)
        return found
