"""The tiny base model: a Llama of 0.8 million parameters that has seen Countdown played.

It is pretrained from scratch on random legal plays, a share of which ends on the target in its
prompt (TARGET_SHARE). So it knows the notation and the arithmetic, uses all strategies, and is
right now and then. In countdown-many and countdown-calculations it has seen many winning plays: a
policy is soon often right, and GRPO settles on one way per problem. In countdown it has seen few
and hardly knows which target asks for which strategy: GRPO is tempted to do nothing but add. All
shares were chosen so that plain GRPO loses strategies; RESULTS.md says what follows from that.

The result is an ordinary Hugging Face folder, so the tiny model and a downloaded one take the same
path through the code.
"""
import math
import random
import zlib
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

import data
from model import Transformer
from support import hub
from support.config import Config
from support.fast import accelerate

PAD, EOS = "<pad>", "<eos>"
# One token per number up to 99; longer numbers are pairs of digits.
VOCABULARY = [PAD, EOS, *map(str, range(100)), *(f"0{i}" for i in range(10)), *"+-*=;,:",
              "use ", " to make "]
PIECES = "[0-9]{1,2}|use | to make |."
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128,
          "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
          "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
          "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0}
# The share of plays whose prompt is made to name the number that they end on. In countdown other
# plays end on their target by chance, which brings 0.08 to 0.2.
TARGET_SHARE = {"countdown": 0.08, "countdown4": 0.3, "countdown-many": 0.5,
                "countdown-calculations": 0.5}
STEPS, BATCH, LEARNING_RATE, WARMUP = 1000, 128, 3e-3, 50


def find_base(config: Config, may_build: bool = True) -> Path:
    """The folder of the run's base model; `tiny` is built first if it is not in the cache."""
    if not config.model:
        raise ValueError("an empty --model: expected tiny, a Hugging Face folder or a hub id")
    if config.model == "tiny":
        return find_tiny(config.data, Path(config.cache), may_build=may_build)
    return hub.find_model_folder(config.model)


def base_folder(task: str, cache: Path) -> Path:
    """Its name tells what the model was taught: an edited world gets a base model of its own."""
    taught = f"{data.COUNTDOWN[task]} {TARGET_SHARE[task]} {STEPS}"
    return cache / f"tiny-{task}-{zlib.crc32(taught.encode()):08x}"


def find_tiny(task: str, cache: Path, seed: int = 0, may_build: bool = True) -> Path:
    if task not in data.COUNTDOWN:
        raise ValueError(f"the tiny model only plays {' and '.join(data.COUNTDOWN)}: with --data "
                         f"{task} give --model a Hugging Face folder or a hub id")
    folder = base_folder(task, cache)
    if (folder / "config.json").exists():
        return folder
    if not may_build:
        raise ValueError(f"{folder} is gone, the base model of this run: put it back, or say with "
                         "--cache where it is")
    return build(folder, task, seed=seed)


def make_tokenizer() -> PreTrainedTokenizerFast:
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


def make_batch(tokenizer, task: str, count: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    """-> ids and targets (count, T), -100 where there is no response token to predict."""
    rules, prompts, plays = data.COUNTDOWN[task], [], []
    for _ in range(count):
        problem = data.random_problem(rules, rng)
        play, result = data.random_play(problem.numbers, rng, use_all=rules.use_all)
        if rng.random() < TARGET_SHARE[task]:
            problem = replace(problem, target=result)
        prompts.append(problem.prompt)
        plays.append(play + EOS)
    prompts, plays = tokenizer(prompts).input_ids, tokenizer(plays).input_ids
    width = max(len(prompt) + len(play) for prompt, play in zip(prompts, plays)) - 1
    ids, targets = torch.zeros(count, width).long(), torch.full((count, width), -100)
    for row, (prompt, play) in enumerate(zip(prompts, plays)):
        length = len(prompt) + len(play) - 1
        ids[row, :length] = torch.tensor(prompt + play[:-1])
        targets[row, len(prompt) - 1:length] = torch.tensor(play)
    return ids, targets


def initialise(model: Transformer, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            deviation = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
            parameter.data.normal_(0, deviation, generator=generator)
        elif name.endswith("bias"):
            parameter.data.zero_()


def build(folder: Path, task: str = "countdown", steps: int = STEPS, seed: int = 0) -> Path:
    """Pretrain on plays and save; two or three minutes on two cores."""
    folder.mkdir(parents=True, exist_ok=True)  # a bad place should fail now, not after the training
    tokenizer, rng = make_tokenizer(), random.Random(f"tiny {data.COUNTDOWN[task].count} {seed}")
    model = accelerate(Transformer(hub.ModelConfig.from_dict(CONFIG)))
    initialise(model, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98),
                                  weight_decay=0.01, fused=True)

    def rate(step: int) -> float:
        return min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    bar = tqdm(range(steps), "building the tiny base model")
    for _ in bar:
        ids, targets = make_batch(tokenizer, task, BATCH, rng)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)  # last: config.json marks a folder that is complete
    return folder
