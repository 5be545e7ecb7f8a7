"""What a run will need before it starts: parameters, memory by stage, tokens. `python train.py --dry-run` prints it.

    weights      P * bytes                                         the frozen base, P parameters
    adapters     A * 16                                            fp32 weight, gradient and AdamW's two moments
    sampling     M * bytes                                         a copy, adapters merged, of the M weights of the layers
                 + (problems * prompt + N * new) * layers * 2 * kv_width * bytes    keys and values, a prompt's once a group
                 + N * V * 12                                      one position's logits and probabilities
    update       tokens * layers * activation_bytes                activations of one micro-batch
                 + LOGITS_AT_ONCE * 12                             a chunk of logits, its softmax and what goes between
with N = problems * samples and, for a micro-batch of b problems, tokens = b * (prompt + samples * new): a prompt goes through
once a group. With --recompute only the inputs of the layers stay, and the activations of one layer at a time.

    arithmetic   tokens of a step * P * (2 to read the prompts or sample + 2 reference + 4 update, 6 with --recompute)
    traffic      new * (P * bytes + half of the keys and values)    what sampling reads, a position at a time
so a step takes about arithmetic / (operations a second) + traffic / (bytes a second).

`reuse_memory` is called before any of it.
"""
import ctypes
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import grpo
import lora
import tiny
from files import read_json
from model import ModelConfig, Transformer

# Shapes of models that people name before they have them; everything else is read from its config.json.
SHAPES = {"Qwen/Qwen2.5-1.5B": {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 131072, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True}}
PROMPT_TOKENS = {"countdown": 9, "countdown4": 11}          # and for word problems:
QUESTION_TOKENS = 150


def reuse_memory() -> None:
    """Let freed memory be used again at once. By default glibc gives large blocks back to the system, and every new tensor
    then pays for fresh pages: a quarter or more of the time of an update on a CPU. Elsewhere this does nothing."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(-8, 1)                              # M_ARENA_MAX: one pool for all threads
        library.mallopt(-3, 2 ** 30) or library.mallopt(-3, 2 ** 25)            # M_MMAP_THRESHOLD; an old glibc takes no more
        library.mallopt(-1, 2 ** 31 - 1)                    # M_TRIM_THRESHOLD


def shape_of(name: str) -> ModelConfig:
    """From the name alone, a folder, or the hub's cache; nothing is fetched and nothing is built."""
    if name == "tiny":
        return ModelConfig.from_dict(tiny.CONFIG)
    if Path(name).is_dir():
        return ModelConfig.from_dict(read_json(Path(name) / "config.json"), f"{name}/config.json")
    if name in SHAPES:
        return ModelConfig.from_dict(SHAPES[name])
    from huggingface_hub import try_to_load_from_cache
    found = try_to_load_from_cache(name, "config.json") if name.count("/") == 1 else None
    if not isinstance(found, str):
        raise ValueError(f"--dry-run cannot tell the shape of {name}: expected a folder, a model in the hub's cache, or "
                         f"{', '.join(SHAPES)}")
    return ModelConfig.from_dict(read_json(Path(found)), found)


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch says it in three ways: with its own type on a GPU, in words on a CPU, and as a size that no number holds."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        words in str(error) for words in ("can't allocate memory", "Storage size calculation overflowed", "Overflow when unpacking"))


OUT_OF_MEMORY = ("not enough memory: lower the number of problems, samples or new tokens, or, in training, --micro-batch; "
                 "--recompute saves more, and train.py --dry-run says what a run needs")


def activation_bytes(shape: ModelConfig, bytes: int, rank: int) -> float:
    """What the update keeps for the backward pass, a token and layer; counted from the tensors that autograd saves."""
    sizes = (shape.hidden_size, shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim, shape.intermediate_size, rank)
    weights = (16.6, 8.3, 6.3, 12.0, 34.5) if bytes == 4 else (8.3, 4.2, 3.2, 6.0, 31.8)
    return sum(size * weight for size, weight in zip(sizes, weights))


def estimate(config, shape: ModelConfig, bytes: int) -> dict[str, float]:
    """-> parameter counts, gigabytes and tokens, under the names that `report` prints."""
    with torch.device("meta"):
        model = Transformer(shape)
        base = sum(parameter.numel() for parameter in model.parameters())
    adapted = [module for name, module in model.named_modules() if name.rpartition(".")[2] in config.targets]
    adapters = sum(config.rank * (module.in_features + module.out_features) for module in adapted)
    prompt, rows = PROMPT_TOKENS.get(config.data, QUESTION_TOKENS), config.problems * config.samples
    kv = (config.problems * prompt + rows * config.max_new_tokens) * shape.layers * 2 * shape.kv_heads * shape.head_dim * bytes
    tokens = min(config.micro_batch, config.problems) * (prompt + config.samples * config.max_new_tokens)
    layer = tokens * activation_bytes(shape, bytes, config.rank)
    activations = tokens * shape.layers * shape.hidden_size * bytes + layer if config.recompute else layer * shape.layers
    naive = min(config.micro_batch, config.problems) * config.samples * config.max_new_tokens * shape.vocab_size * 4
    update = activations + min(grpo.LOGITS_AT_ONCE * 12, 3 * naive)
    step_tokens = config.problems * prompt + rows * config.max_new_tokens
    passes = 2 + 2 * (config.kl > 0) + 4 + 2 * config.recompute
    sampling = sum(module.weight.numel() for module in model.layers.modules() if hasattr(module, "in_features")) * bytes + kv + rows * shape.vocab_size * 12
    return {"base parameters": base, "adapter parameters": adapters, "base weights, GB": base * bytes / 1e9,
            "adapters and optimizer, GB": adapters * 16 / 1e9, "sampling, GB": sampling / 1e9, "update, GB": update / 1e9,
            "peak, GB": (base * bytes + adapters * 16 + max(sampling, update)) / 1e9,
            "logits of a micro-batch if they were kept, GB": naive / 1e9,
            "arithmetic a step, TFLOP, at most": step_tokens * base * passes / 1e12,
            "read while sampling a step, TB, at most": config.max_new_tokens * (base * bytes + kv / 2) / 1e12,
            "sampled tokens a step, at most": rows * config.max_new_tokens,
            "sampled tokens in all, at most": rows * config.max_new_tokens * config.steps}


def report(config) -> str:
    shape = shape_of(config.model)
    bytes = 2 if config.dtype == "bfloat16" or (config.dtype == "auto" and torch.cuda.is_available()) else 4
    if config.dtype == "auto" and config.preset == "paper":
        bytes = 2                                           # a GPU's default: the preset is meant for one
    lora.check(config.rank, config.lora_alpha, config.targets)
    lines = [f"{name:50} {value}" for name, value in asdict(config).items()]
    lines += ["", f"expected, with weights of {bytes} bytes and prompts of about "
                  f"{PROMPT_TOKENS.get(config.data, QUESTION_TOKENS)} tokens:"]
    lines += [f"{name:50} {value:,.2f}" if isinstance(value, float) else f"{name:50} {value:,}"
              for name, value in estimate(config, shape, bytes).items()]
    return "\n".join([*lines, "", "nothing was read but the model's shape, and nothing was written"])
