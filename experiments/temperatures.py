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
from experiments import compare
from experiments.compare import SPLITS
from support import checkpoint, files
from support.config import Parser, guard

TEMPERATURES = (0.2, 0.4, 0.7, 1.0, 1.3)
KEPT = (*compare.MEASURES, "strategy_choice", "strategy_entropy", "cluster_entropy", "distinct")


def read_file(folder: Path, base: bool) -> tuple[Path, list[dict]]:
    """Where a run's measures are, or those of its base model, and all of its lines."""
    file = folder / ("base.jsonl" if base else "temperatures.jsonl")
    return file, files.read_lines(file, key="split")


def find_measured(folder: Path, split: str, count: int, base: bool = False,
                  at: tuple[float, ...] = TEMPERATURES) -> list[dict]:
    """A run's lines on so many problems of a split, those that were measured as it is now."""
    _, lines = read_file(folder, base)
    step = checkpoint.find_step(folder, {})
    return [line for line in lines if line["temperature"] in at and (
        line["split"], line.get("asked"), line.get("step")) == (split, count, step)]


def is_measured(folder: Path, split: str, count: int, base: bool = False,
                at: tuple[float, ...] = TEMPERATURES) -> bool:
    return len(find_measured(folder, split, count, base, at)) == len(at)


def measure_run(folder: Path, splits: list[str], count: int, base: bool = False,
                at: tuple[float, ...] = TEMPERATURES) -> None:
    """Write a run's lines on so many problems of each split, but for those that are there."""
    checkpoint.require_run(folder)
    if all(is_measured(folder, split, count, base, at) for split in splits):
        return
    policy, clustering, step = evaluate.open_run(folder)
    if step < policy.config.steps:
        print(f"note: {folder} has {step} of its {policy.config.steps} steps")
    for split in splits:
        measured = {line["temperature"] for line in find_measured(folder, split, count, base, at)}
        missing = [temperature for temperature in at if temperature not in measured]
        problems = data.load(policy.config.data, split, count) if missing else []
        for temperature in tqdm(missing, f"{folder.name}, {split}", leave=False):
            config = replace(policy.config, eval_split=split, eval_samples=16,
                             eval_temperature=temperature)
            with lora.disabled(policy.model) if base else nullcontext():
                found = evaluate.evaluate(policy, problems, config, clustering)
            new = {"step": step, "asked": count, **found.metrics}
            file, known = read_file(folder, base)
            kept = [line for line in known if line["split"] != split or (
                line.get("asked"), line.get("step")) == (count, step)]
            files.write_lines(file, sorted([*kept, new], key=lambda line: (
                SPLITS.index(line["split"]), line["temperature"])))


def read_measures(folders: list[Path], splits: tuple[str, ...] = SPLITS,
                  at: tuple[float, ...] | None = None) -> list[dict]:
    """What was measured of runs and of their base models, in short lines with name and seed."""
    found = {}
    for folder in folders:
        config, step = checkpoint.read_config(folder), checkpoint.find_step(folder, {})
        model = config.cache if config.model == "tiny" else config.model
        about = {"seed": config.seed, "base": Path(model).name, "data": config.data}
        names = {False: compare.setting_name(folder, config.data), True: "base model"}
        for base, name in names.items():
            for line in read_file(folder, base)[1]:
                is_asked = line["split"] in splits and (at is None or line["temperature"] in at)
                if is_asked and line.get("step") == step:
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
        if not all(t == 0 or 1e-6 <= t < 1e9 for t in at):
            raise ValueError("--at: expected temperatures, each 0, which is greedy, or at least "
                             "1e-6")
        for folder in arguments.runs:
            measure_run(folder, arguments.splits, arguments.problems, arguments.base, at)
        lines = read_measures(arguments.runs, tuple(arguments.splits), at)
        if arguments.output:
            files.write_lines(arguments.output, lines)
        print(compare.make_tables(lines))


if __name__ == "__main__":
    main()
