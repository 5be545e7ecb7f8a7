"""Measure finished runs at several temperatures, and compare them.

    python -m experiments.temperatures runs/sus-1 runs/grpo-1 --splits validation test

Each run folder gets temperatures.jsonl, a line per split and temperature, which is used again;
--output writes all lines into one file, from which experiments.compare and .plot read.
Runs whose folders differ only in the number at the end are seeds of one setting. The tables are
those of experiments.compare. --base measures the runs' base models instead, into base.jsonl.
"""
import argparse
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

import data
import evaluate
import lora
import sample
from experiments import compare
from experiments.compare import SPLITS
from support import checkpoint, files, tiny
from support.config import Parser, guard
from support.fast import accelerate

TEMPERATURES = (0.2, 0.4, 0.7, 1.0, 1.3)
KEPT = (*compare.MEASURES, "strategy_choice", "strategy_entropy", "cluster_entropy", "distinct")


def read_file(folder: Path, base: bool) -> tuple[Path, list[dict]]:
    """Where a run's measures are, or those of its base model, and all of its lines."""
    file = folder / ("base.jsonl" if base else "temperatures.jsonl")
    return file, files.read_lines(file, key="split")


def find_measured(folder: Path, split: str, count: int, base: bool = False,
                  at: tuple[float, ...] = TEMPERATURES) -> list[dict]:
    """The lines of a run on so many problems of a split, if it was measured as it is now."""
    _, lines = read_file(folder, base)
    step = checkpoint.find_step(folder, {})
    found = [line for line in lines
             if (line["split"], line.get("asked"), line.get("step")) == (split, count, step)]
    return found if [line["temperature"] for line in found] == list(at) else []


def measure_run(folder: Path, splits: list[str], count: int, base: bool = False,
                at: tuple[float, ...] = TEMPERATURES) -> None:
    """Write a run's lines on so many problems of each split, unless they are there."""
    config = checkpoint.read_config(folder)
    if config is None:
        raise ValueError(f"{folder} is not a run of train.py")
    missing = [split for split in splits if not find_measured(folder, split, count, base, at)]
    if not missing:
        return
    policy = sample.open_policy(tiny.find_base(config, may_build=False), config)
    clustering, step = evaluate.load_run(policy, folder)
    if step < config.steps:
        print(f"note: {folder} has {step} of its {config.steps} steps")
    accelerate(policy.model)
    for split in missing:
        problems, lines = data.load(config.data, split, count), []
        for temperature in tqdm(at, f"{folder.name}, {split}", leave=False):
            here = replace(config, eval_split=split, eval_samples=16, eval_temperature=temperature)
            with lora.disabled(policy.model) if base else nullcontext():
                found = evaluate.evaluate(policy, problems, here, clustering)
            lines.append({"step": step, "asked": count, **found.metrics})
        file, known = read_file(folder, base)
        files.write_lines(file, [line for line in known if line["split"] != split] + lines)


def read_measures(folders: list[Path], splits: tuple[str, ...] = SPLITS) -> list[dict]:
    """What was measured of runs and of their base models, in short lines with name and seed."""
    found = {}
    for folder in folders:
        config, step = checkpoint.read_config(folder), checkpoint.find_step(folder, {})
        model = config.cache if config.model == "tiny" else config.model
        about = {"seed": config.seed, "base": Path(model).name, "data": config.data}
        names = {False: compare.setting_name(folder, config.data), True: "base model"}
        for base, name in names.items():
            for line in read_file(folder, base)[1]:
                if line["split"] in splits and line.get("step") == step:
                    short = {key: line[key] for key in ("split", "temperature", "problems",
                                                        "samples")}
                    measures = {key: round(line[key], 5) for key in KEPT if line[key] is not None}
                    # Each base model counts once, beside whichever runs it was measured.
                    key = (name, *short.values(), *about.values(), base or folder)
                    found[key] = {"name": name, **about, **short, **measures}
    return list(found.values())


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of train.py")
    parser.add_argument("--splits", nargs="+", default=["validation", "test"], choices=SPLITS)
    parser.add_argument("--problems", type=int, default=400, help="of each split (default 400)")
    parser.add_argument("--at", nargs="+", type=float, default=TEMPERATURES,
                        help="the temperatures (default 0.2 0.4 0.7 1.0 1.3)")
    parser.add_argument("--base", action="store_true", help="the base models of these runs")
    parser.add_argument("--output", type=Path, help="also write all lines to this .jsonl file")
    arguments = parser.parse_args(argv)
    with guard(lambda: "The same command goes on from here."):
        if arguments.problems < 1:
            raise ValueError(f"--problems {arguments.problems}: expected 1 or more")
        at = tuple(sorted(set(arguments.at)))
        if at[0] < 0:
            raise ValueError(f"--at {at[0]:g}: expected temperatures of 0 or more")
        for folder in arguments.runs:
            measure_run(folder, arguments.splits, arguments.problems, arguments.base, at)
        lines = read_measures(arguments.runs, tuple(arguments.splits))
        if arguments.output:
            files.write_lines(arguments.output, lines)
        print(compare.make_tables(lines))


if __name__ == "__main__":
    main()
