"""What a run will need, before it starts: `python train.py --dry-run` prints it.

    weights      P * bytes                          the frozen base, P parameters
    adapters     A * 16                             fp32 weight, gradient and AdamW's two moments
    sampling     M * bytes + keys and values + N * V * 12     M: the layers' weights, merged
    update       tokens * layers * activation_bytes + LOGITS_AT_ONCE * 12     of one micro-batch
    arithmetic   tokens * P * (2 to sample + 2 reference + 4 update, 6 with --recompute)
    traffic      new tokens * (P * bytes + half of the keys and values)

N = problems * samples; a prompt counts once per group. With --recompute only the inputs of the
layers stay, and the activations of one layer. A step takes about arithmetic / (operations per
second) + traffic / (bytes per second).
"""
import math
from dataclasses import asdict
from pathlib import Path

import torch

import data
import grpo
import lora
import reward
from model import Transformer
from sample import Rollout
from support import files, parallel, tiny
from support.config import Config, check_config
from support.fast import LOGITS_AT_ONCE
from support.hub import ModelConfig

# Shapes of models that people name before they have them; others are read from their config.json.
QWEN = {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536,
        "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "max_position_embeddings": 131072, "tie_word_embeddings": True}
SHAPES = {"tiny": tiny.CONFIG, "Qwen/Qwen2.5-1.5B": QWEN, "Qwen/Qwen2.5-1.5B-Instruct": QWEN}
QUESTION_TOKENS = 150  # of a word problem's prompt
# Bytes that autograd keeps per token and layer, for each unit of the hidden size, the queries, the
# keys and values, the intermediate size and the rank; counted from the tensors that it saves.
KEPT = {4: (16.6, 8.3, 6.3, 16.0, 34.5), 2: (12.3, 4.2, 3.2, 8.0, 31.8)}


def find_shape(name: str) -> ModelConfig:
    """From the name, a folder, or the hub's cache; nothing is downloaded or built."""
    if name in SHAPES:
        return ModelConfig.from_dict(SHAPES[name])
    file = Path(name) / "config.json"
    if not file.exists():
        from huggingface_hub import try_to_load_from_cache
        cached = try_to_load_from_cache(name, "config.json") if name.count("/") == 1 else None
        if not isinstance(cached, str):
            raise ValueError(f"--dry-run cannot tell the shape of {name}: expected a folder, a "
                             f"model in the hub's cache, or one of {', '.join(SHAPES)}")
        file = Path(cached)
    return ModelConfig.from_dict(files.read_json(file), str(file))


def count_prompt_tokens(task: str) -> int:
    """In a Countdown prompt of the tiny model each number, comma and phrase is one token."""
    return 2 * data.COUNTDOWN[task].count + 3 if task in data.COUNTDOWN else QUESTION_TOKENS


def activation_bytes(shape: ModelConfig, width: int, rank: int) -> float:
    """What the update keeps for the backward pass, per token and layer."""
    sizes = (shape.hidden_size, shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim,
             shape.intermediate_size, rank)
    return sum(size * per_unit for size, per_unit in zip(sizes, KEPT[width]))


def estimate(config: Config, shape: ModelConfig, width: int) -> dict[str, float]:
    """width: bytes per base weight -> parameters, gigabytes and tokens under printable names."""
    with torch.device("meta"):
        model = lora.apply(Transformer(shape), config.rank)
    adapters = sum(adapter.numel() for adapter in lora.parameters(model).values())
    base = sum(parameter.numel() for parameter in model.parameters()) - adapters
    prompt = count_prompt_tokens(config.data)
    new, rows = config.max_new_tokens, config.problems * config.samples
    tokens = config.problems * prompt + rows * new
    cache = tokens * shape.layers * 2 * shape.kv_heads * shape.head_dim * width
    merged = sum(layer.weight.numel() for layer in lora.layers(model).values()) * width
    sampling = merged + cache + rows * shape.vocab_size * 12

    problems = min(config.micro_batch, config.problems)
    micro_tokens = problems * (prompt + config.samples * new)
    activations = micro_tokens * activation_bytes(shape, width, config.rank) * shape.layers
    if config.recompute:
        inputs = micro_tokens * shape.layers * shape.hidden_size * width
        activations = activations / shape.layers + inputs
    logits = problems * config.samples * new * shape.vocab_size * 4
    update = activations + min(LOGITS_AT_ONCE * 12, 3 * logits)
    passes = 2 + 2 * (config.kl > 0) + 4 + 2 * config.recompute
    weights, optimizer = base * width, adapters * 16
    return {"base parameters": base, "adapter parameters": adapters,
            "base weights, GB": weights / 1e9, "adapters and optimizer, GB": optimizer / 1e9,
            "sampling, GB": sampling / 1e9, "update, GB": update / 1e9,
            "peak, GB": (weights + optimizer + max(sampling, update)) / 1e9,
            "arithmetic per step, TFLOP, at most": tokens * base * passes / 1e12,
            "read while sampling per step, TB, at most": new * (weights + cache / 2) / 1e12,
            "sampled tokens per step, at most": rows * new,
            "sampled tokens in all, at most": rows * new * config.steps}


def try_worst_step(run) -> None:
    """On a GPU, the gradient of the largest micro-batch there can be; run: train.Run.

    If memory is short, this says so in the first minute and not after an hour. Nothing is learned.
    """
    config, model = run.config, run.model
    if model.device.type == "cpu":
        return
    problems = math.ceil(config.problems / parallel.world())  # the most that a process has
    prompts = sorted(run.prompts, key=len)[-min(config.micro_batch, problems):]
    zeros = torch.zeros(len(prompts) * config.samples, config.max_new_tokens, device=model.device)
    lengths = torch.full_like(zeros[:, 0], config.max_new_tokens).long()
    rollout = Rollout(zeros.long(), lengths, zeros, lengths > 0)
    advantages = torch.ones(len(prompts), config.samples, device=model.device)
    grpo.accumulate_gradient(model, prompts, rollout, advantages, config,
                             zeros if config.kl else None)
    run.optimizer.zero_grad()


def report(config: Config) -> str:
    """The text of --dry-run. What train.py would refuse, it refuses."""
    check_config(config)
    reward.find_method(config.method)
    if config.data not in data.COUNTDOWN:
        data.find_task(config.data)
        if config.model == "tiny":
            tiny.find_base(config)  # says that the tiny model plays Countdown only
    shape = find_shape(config.model)
    prompt = count_prompt_tokens(config.data)
    if prompt + config.max_new_tokens > shape.context:
        raise ValueError(f"a prompt of about {prompt} tokens and {config.max_new_tokens} new ones "
                         f"exceed the model's context of {shape.context}")
    gpu = torch.cuda.is_available() or config.preset != "none"  # presets are meant for a GPU
    width = 2 if config.dtype == "bfloat16" or (config.dtype == "auto" and gpu) else 4
    lines = [f"{name:50} {value}" for name, value in asdict(config).items()]
    lines += ["", f"expected, with base weights of {width} bytes (nothing was read or written):"]
    for name, value in estimate(config, shape, width).items():
        lines.append(f"{name:50} {value:,.2f}" if type(value) is float else f"{name:50} {value:,}")
    return "\n".join(lines)
