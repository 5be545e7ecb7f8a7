"""What a run will need before it starts: parameters, memory by stage, tokens. train.py --dry-run prints it.

    weights      P * bytes                          the frozen base, P parameters
    adapters     A * 16                             fp32 weight, gradient and AdamW's two moments
    sampling     M * bytes                          a merged copy of the M weights of the layers
                 + (problems * prompt + N * new) * layers * 2 * kv_width * bytes    keys and values
                 + N * V * 12                       logits and probabilities of one position
    update       tokens * layers * activation_bytes     activations of one micro-batch
                 + LOGITS_AT_ONCE * 12              a chunk of logits and its softmax

with N = problems * samples and, for a micro-batch of b problems, tokens = b * (prompt + samples * new):
a prompt goes through the model once per group. With --recompute only the inputs of the layers stay, and
the activations of one layer at a time.

    arithmetic   tokens of a step * P * (2 to read or sample + 2 reference + 4 update, 6 recomputing)
    traffic      new * (P * bytes + half of the keys and values)        what sampling reads

A step takes about arithmetic / (operations per second) + traffic / (bytes per second).
"""
from dataclasses import asdict
from pathlib import Path

import torch

import data
import lora
from model import Transformer
from support import files, tiny
from support.config import Config
from support.fast import LOGITS_AT_ONCE
from support.hub import ModelConfig

# Shapes of models that people name before they have them; others are read from their config.json.
SHAPES = {"Qwen/Qwen2.5-1.5B": {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True}}
PROMPT_TOKENS = {"countdown": 9, "countdown4": 11}
QUESTION_TOKENS = 150  # of a word problem's prompt
# Bytes that autograd keeps per token and layer, for each unit of the hidden size, the queries, the keys
# and values, the intermediate size and the LoRA rank; counted from the tensors that it saves.
KEPT_FP32 = (16.6, 8.3, 6.3, 12.0, 34.5)
KEPT_BF16 = (8.3, 4.2, 3.2, 6.0, 31.8)


def find_shape(name: str) -> ModelConfig:
    """From the name alone, a folder, or the hub's cache; nothing is downloaded or built."""
    if name == "tiny":
        return ModelConfig.from_dict(tiny.CONFIG)
    if Path(name).is_dir():
        return ModelConfig.from_dict(files.read_json(Path(name) / "config.json"), name)
    if name in SHAPES:
        return ModelConfig.from_dict(SHAPES[name])
    from huggingface_hub import try_to_load_from_cache
    cached = try_to_load_from_cache(name, "config.json") if name.count("/") == 1 else None
    if not isinstance(cached, str):
        raise ValueError(f"--dry-run cannot tell the shape of {name}: expected a folder, a model in the "
                         f"hub's cache, or {', '.join(SHAPES)}")
    return ModelConfig.from_dict(files.read_json(Path(cached)), cached)


def activation_bytes(shape: ModelConfig, weight_bytes: int, rank: int) -> float:
    """What the update keeps for the backward pass, per token and layer."""
    queries, keys_values = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    sizes = (shape.hidden_size, queries, keys_values, shape.intermediate_size, rank)
    kept = KEPT_FP32 if weight_bytes == 4 else KEPT_BF16
    return sum(size * per_unit for size, per_unit in zip(sizes, kept))


def estimate(config: Config, shape: ModelConfig, weight_bytes: int) -> dict[str, float]:
    """-> parameter counts, gigabytes and tokens, under the names that `report` prints."""
    with torch.device("meta"):
        model = Transformer(shape)
    base = sum(parameter.numel() for parameter in model.parameters())
    linear = {name: module for name, module in model.layers.named_modules()
              if isinstance(module, torch.nn.Linear)}
    adapters = sum(config.rank * (module.in_features + module.out_features)
                   for name, module in linear.items() if name.rpartition(".")[2] in lora.TARGETS)
    prompt = PROMPT_TOKENS.get(config.data, QUESTION_TOKENS)
    new, rows = config.max_new_tokens, config.problems * config.samples
    step_tokens = config.problems * prompt + rows * new
    cache = step_tokens * shape.layers * 2 * shape.kv_heads * shape.head_dim * weight_bytes
    copies = sum(module.weight.numel() for module in linear.values()) * weight_bytes
    sampling = copies + cache + rows * shape.vocab_size * 12

    problems = min(config.micro_batch, config.problems)
    tokens = problems * (prompt + config.samples * new)
    layer = tokens * activation_bytes(shape, weight_bytes, config.rank)
    activations = layer * shape.layers
    if config.recompute:
        activations = layer + tokens * shape.layers * shape.hidden_size * weight_bytes
    logits = problems * config.samples * new * shape.vocab_size * 4
    update = activations + min(LOGITS_AT_ONCE * 12, 3 * logits)

    passes = 2 + 2 * (config.kl > 0) + 4 + 2 * config.recompute
    weights, optimizer = base * weight_bytes, adapters * 16
    return {"base parameters": base,
            "adapter parameters": adapters,
            "base weights, GB": weights / 1e9,
            "adapters and optimizer, GB": optimizer / 1e9,
            "sampling, GB": sampling / 1e9,
            "update, GB": update / 1e9,
            "peak, GB": (weights + optimizer + max(sampling, update)) / 1e9,
            "logits of a micro-batch if they were kept, GB": logits / 1e9,
            "arithmetic per step, TFLOP, at most": step_tokens * base * passes / 1e12,
            "read while sampling per step, TB, at most": new * (weights + cache / 2) / 1e12,
            "sampled tokens per step, at most": rows * new,
            "sampled tokens in all, at most": rows * new * config.steps}


def report(config: Config) -> str:
    if config.data not in data.COUNTDOWN:
        data.find_task(config.data)  # says what is wrong with the name
    shape = find_shape(config.model)
    wide = config.dtype == "float32" or (config.dtype == "auto" and not torch.cuda.is_available())
    if config.dtype == "auto" and config.preset == "paper":
        wide = False  # the preset is meant for a GPU
    weight_bytes = 4 if wide else 2
    prompt = PROMPT_TOKENS.get(config.data, QUESTION_TOKENS)
    lines = [f"{name:50} {value}" for name, value in asdict(config).items()]
    lines += ["", f"expected, with weights of {weight_bytes} bytes and prompts of about {prompt} "
                  "tokens:"]
    for name, value in estimate(config, shape, weight_bytes).items():
        lines.append(f"{name:50} {value:,.2f}" if type(value) is float else f"{name:50} {value:,}")
    lines += ["", "nothing was read but the model's shape, and nothing was written"]
    return "\n".join(lines)
