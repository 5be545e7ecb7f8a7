"""Sampling: several responses to each prompt, from the distribution that training scores.

Each prompt is read once, and its keys and values are shared by its responses. There is no top-k, no
top-p and no repetition penalty, neither here nor from a model's generation_config.json, so the
log-probability kept for each token is the one that grpo.score recomputes (up to rounding).

Random numbers: one uniform number per row and step, drawn for all rows beforehand. A response
depends on the seed and on its own row, not on when its neighbours finish.

Policy is a model with its tokenizer: it turns problems into token ids and token ids into text.
"""
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model import SharedPrefix, Transformer
from support import hub
from support.config import Config

LOOK_EVERY = 16  # tokens between looks for ended rows on a GPU: each look makes Python wait for it


@dataclass
class Rollout:
    """N = prompts * samples responses; row n answers prompt n // samples."""
    ids: Tensor  # (N, T) response tokens, zero after the end
    lengths: Tensor  # (N,) tokens in the response, its end token included
    logprobs: Tensor  # (N, T) of each token under the sampling distribution, zero after the end
    finished: Tensor  # (N,) False where max_new_tokens cut the response off

    def mask(self) -> Tensor:
        """(N, T), True on response tokens; from the lengths, since any id may occur inside."""
        return torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]


def seeded(*key) -> torch.Generator:
    """Random numbers that follow from the key alone, such as (seed, use, step)."""
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def pad_left(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """-> ids (B, P) and each row's first real slot (B,), None when nothing is padded."""
    width = max(map(len, prompts))
    starts = [width - len(prompt) for prompt in prompts]
    rows = [[0] * start + prompt for start, prompt in zip(starts, prompts)]
    start = torch.tensor(starts, device=device) if any(starts) else None
    return torch.tensor(rows, device=device), start


def sample_token(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse transform sampling: the first token whose cumulative probability exceeds `uniform`.

    logits (n, V), uniform (n,) in [0, 1) -> tokens (n,) and their log-probabilities (n,).
    """
    if temperature == 0:
        return logits.argmax(-1), logits.float().amax(-1) * 0  # nan if the logits are not finite
    probabilities = F.softmax(logits.float() / temperature, dim=-1)
    cumulative = probabilities.to(uniform.dtype).cumsum(-1)
    total = cumulative[:, -1:]
    threshold = uniform[:, None] * total
    # Below the total, so that rounding never chooses a token of probability zero.
    threshold = torch.minimum(threshold, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.shape[1] - 1)
    return tokens[:, 0], probabilities.gather(1, tokens)[:, 0].log()


class Decoder:
    """The next token's logits, by reading the whole response again: short, and slow.

    support/decoder.py is the fast twin; `room` (the most tokens to come) and `finished` are for it,
    which reserves memory and drops rows.
    """
    sample_token = staticmethod(sample_token)

    def __init__(self, model: Transformer, prompts: list[list[int]], samples: int, room: int):
        self.model = model
        self.prefix = SharedPrefix(samples)
        prompt_ids, self.start = pad_left(prompts, model.device)
        last = model.hidden(prompt_ids, self.start, self.prefix)[:, -1]  # (B, D)
        self.logits = F.linear(last, model.head).repeat_interleave(samples, dim=0)  # (N, V)
        self.rows = torch.arange(len(self.logits), device=model.device)  # rows that are decoded
        self.ids = self.rows.new_empty(len(self.rows), 0)

    def step(self, tokens: Tensor, finished: Tensor | None) -> None:
        """Append one token per row (n,) and compute the logits (n, V) after it."""
        self.ids = torch.cat((self.ids, tokens[:, None]), dim=1)
        hidden = self.model.hidden(self.ids, self.start, self.prefix)
        self.logits = F.linear(hidden[:, -1], self.model.head)


def generate(model: Transformer, prompts: list[list[int]], samples: int, max_new_tokens: int,
             temperature: float, eos_ids: tuple[int, ...], generator: torch.Generator) -> Rollout:
    """Sample `samples` responses of at most max_new_tokens to each prompt."""
    check_request(model, prompts, max_new_tokens)
    device = model.device
    N, T = len(prompts) * samples, max_new_tokens
    wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no fp64
    uniform = torch.rand(T, N, generator=generator, dtype=torch.float64).to(device, wide)
    ends = torch.tensor(eos_ids, device=device)
    ids = torch.zeros(N, T, dtype=torch.long, device=device)
    logprobs = torch.zeros(N, T, device=device)
    lengths = torch.full((N,), T, device=device)
    finished = torch.zeros(N, dtype=torch.bool, device=device)
    look_every = 1 if device.type == "cpu" else LOOK_EVERY

    with torch.inference_mode():
        make_decoder = getattr(model, "decoder", Decoder)  # an accelerated model has its own
        decoder = make_decoder(model, prompts, samples, T)
        for t in range(T):
            rows = decoder.rows
            tokens, chosen = decoder.sample_token(decoder.logits, temperature, uniform[t, rows])
            ids[rows, t] = tokens
            logprobs[rows, t] = chosen
            ended = torch.isin(tokens, ends) & ~finished[rows]  # (n,)
            lengths[rows] = torch.where(ended, t + 1, lengths[rows])
            finished[rows] |= ended
            looks = (t + 1) % look_every == 0
            if t + 1 == T or looks and finished.all():
                break
            decoder.step(tokens, finished if looks else None)

    if not logprobs.isfinite().all():
        raise FloatingPointError("the model's logits are not finite: its weights may be damaged, or"
                                 " the learning rate too high")
    T = int(lengths.max())
    is_response = torch.arange(T, device=device) < lengths[:, None]  # (N, T)
    return Rollout(ids[:, :T] * is_response, lengths, logprobs[:, :T] * is_response, finished)


def check_request(model: Transformer, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Refuse prompts that this model cannot read, or that leave no room for a response."""
    config = model.config
    if not prompts or not all(prompts):
        raise ValueError("there is no prompt to sample from, or an empty one: each needs a token")
    largest, longest = max(map(max, prompts)), max(map(len, prompts))
    if largest >= config.vocab_size:
        raise ValueError(f"a prompt has token {largest}, the model knows {config.vocab_size}: the "
                         "tokenizer belongs to another model")
    if longest + max_new_tokens > config.context:
        raise ValueError(f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the "
                         f"model's context of {config.context}: shorten the prompts or lower "
                         "--max-new-tokens")


@dataclass
class Policy:
    """A model that reads problems and writes text."""
    model: Transformer
    tokenizer: object
    eos_ids: tuple[int, ...]
    config: Config  # its prompt, system and instruction say how a problem is put to the model
    base: str = ""  # where others find the base model: a folder or a hub id

    @property
    def is_chat(self) -> bool:
        if self.config.prompt == "auto":
            return bool(self.tokenizer.chat_template)
        return self.config.prompt == "chat"

    def chat_messages(self, problem) -> list[dict[str, str]]:
        instruction = self.config.instruction or getattr(problem, "instruction", "")
        question = getattr(problem, "question", problem.prompt)
        content = f"{question}\n{instruction}" if instruction else question
        messages = [{"role": "user", "content": content}]
        if self.config.system:
            messages.insert(0, {"role": "system", "content": self.config.system})
        return messages

    def plain_text(self, problem) -> str:
        own, instruction = getattr(problem, "instruction", ""), self.config.instruction
        if not instruction:
            return problem.prompt
        if own and own in problem.prompt:
            return problem.prompt.replace(own, instruction)
        return f"{instruction}\n{problem.prompt}"

    def encode(self, problems: list) -> list[list[int]]:
        """Token ids of what the model reads."""
        if not self.is_chat:
            return self.tokenizer([self.plain_text(problem) for problem in problems]).input_ids
        messages = [self.chat_messages(problem) for problem in problems]
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                                      return_dict=False)
        except Exception as error:  # a template may refuse, and raises what it likes
            raise ValueError(f"the chat template fails ({type(error).__name__}: {error}): use "
                             "--prompt plain, or leave out --system") from None

    def decode(self, rollout: Rollout) -> list[str]:
        """Text without the end token; the judge sees everything else that was sampled."""
        kept = (rollout.lengths - rollout.finished.long()).tolist()
        rows = [ids[:length] for ids, length in zip(rollout.ids.tolist(), kept)]
        return self.tokenizer.batch_decode(rows)


def open_policy(folder: Path, config: Config) -> Policy:
    """The model and the tokenizer of a Hugging Face folder."""
    device, dtype = hub.find_device(config.device), config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    model = Transformer.from_pretrained(folder, getattr(torch, dtype), device)
    tokenizer = hub.open_tokenizer(folder)
    if config.prompt == "chat" and not tokenizer.chat_template:
        raise ValueError(f"--prompt chat: {folder} has no chat template; use plain or auto")
    eos_ids = hub.find_eos_ids(folder, tokenizer, model.config.vocab_size, config.stop)
    base = str(folder.absolute()) if config.model == "tiny" else config.model
    policy = Policy(model, tokenizer, eos_ids, config, base)
    if config.system and not policy.is_chat:
        raise ValueError("--system needs a chat: leave it out, or use a model with a chat template")
    return policy
