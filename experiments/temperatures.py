"""Finished runs at several temperatures: curves, and each policy at the temperature that suits it.

    python -m experiments.temperatures runs/sus-1 runs/grpo-1 --split validation

How sharp a policy is can be chosen for free when it is decoded, so two policies are compared at the
temperature that validation chose for each, or at equal accuracy along both curves. Each run folder
gets temperatures.jsonl, one line per split and temperature. Runs whose folders differ only in the
number at the end are seeds of one setting; the table has means over them.
"""
import argparse
import re
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

import data
import evaluate
import lora
import sample
from support import checkpoint, files, tiny
from support.config import Parser, guard
from support.fast import accelerate

TEMPERATURES = (0.3, 0.6, 1.0)
COLUMNS = ("pass@1", "pass@5", "pass@16", "coverage")


def measure_run(folder: Path, split: str, count: int) -> list[dict]:
    """The lines of a run on a split, measured now or found in its file."""
    config = checkpoint.read_config(folder)
    if config is None:
        raise ValueError(f"{folder} is not a run of train.py")
    file = folder / "temperatures.jsonl"
    known = [line for line in files.read_lines(file, key="split") if line["split"] == split]
    if known:
        return known
    config = replace(config, eval_split=split, eval_problems=count, eval_samples=16)
    policy = sample.open_policy(tiny.find_base(config, may_build=False), config)
    lora.load(policy.model, folder / "adapter")
    accelerate(policy.model)
    problems = data.load(config.data, split, count)
    lines = []
    for temperature in tqdm(TEMPERATURES, folder.name, leave=False):
        found = evaluate.evaluate(policy, problems, replace(config, eval_temperature=temperature))
        lines.append({"split": split, "temperature": temperature, **found.metrics})
    for line in lines:
        files.append_line(file, line)
    return lines


def choose_temperature(lines: list[dict], metric: str) -> float:
    """The temperature with the highest value; of equal ones the lowest."""
    return max(lines, key=lambda line: (line[metric], -line["temperature"]))["temperature"]


def interpolate(lines: list[dict], metric: str, at: str, value: float) -> float | None:
    """`metric` where the curve's `at` has this value, None where the curve does not reach it."""
    points = sorted((line[at], line[metric]) for line in lines)
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x0 <= value <= x1:
            return y0 if x0 == x1 else y0 + (y1 - y0) * (value - x0) / (x1 - x0)
    return None


def mean_curve(curves: list[list[dict]]) -> list[dict]:
    """Curves of several seeds -> their mean at each temperature."""
    return [{"temperature": lines[0]["temperature"],
             **{name: sum(line[name] for line in lines) / len(lines) for name in COLUMNS}}
            for lines in zip(*curves)]


def make_table(curves: dict[str, list[dict]]) -> str:
    """{setting: mean curve} -> one row per setting, one column per temperature."""
    first = next(iter(curves.values()))
    lines = [["", *(f"T {line['temperature']}" for line in first)], ["---"] * (len(first) + 1)]
    for name, curve in curves.items():
        cells = [", ".join(f"{100 * line[column]:.1f}" for column in COLUMNS) for line in curve]
        lines.append([name, *cells])
    head = f"{', '.join(COLUMNS)} in per cent\n\n"
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of train.py")
    parser.add_argument("--split", default="test", choices=("test", "validation", "test-drawn"))
    parser.add_argument("--problems", type=int, default=400, help="how many (default 400)")
    arguments = parser.parse_args(argv)
    with guard():
        curves = {}
        for folder in arguments.runs:
            name = re.sub(r"(-\d+)+$", "", folder.name)
            lines = measure_run(folder, arguments.split, arguments.problems)
            curves.setdefault(name, []).append(lines)
        print(make_table({name: mean_curve(each) for name, each in curves.items()}))


if __name__ == "__main__":
    main()
