"""Figures as PNG files, from run folders or from measures; needs matplotlib.

    python -m experiments.plot runs/reproduce/many          every figure that these runs can show
    python -m experiments.plot runs/a runs/b --output figures
    python -m experiments.plot results/many.jsonl --output figures    writes figures/many.png

Runs whose folders differ only in the number at the end are seeds of one setting: they share a line,
with the 95 % interval of their mean as a band.

    temperatures        pass@1 against pass@16 and against coverage as the temperature rises, from
                        a file that experiments.reproduce or .temperatures writes, named like it
    story, diversity, intrinsic, losses, training    metrics over the steps; dotted: the entropy of
                        a policy that is always right, with one strategy per problem or with all
    passes              pass@k against k
    embeddings          a map of responses, coloured by true strategy or else by cluster
"""
import argparse
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import data
from experiments.compare import (
    MATCHED,
    SPLITS,
    known,
    mean_and_half,
    mean_curve,
    read_curves,
    setting_name,
)
from support.checkpoint import CHANGEABLE
from support.config import Parser, guard
from support.files import read_json, read_lines

OVER_STEPS = {
    "story": ("pass@1", "pass@5", "strategy_entropy"),
    "diversity": ("strategy_entropy", "cluster_entropy"),
    "intrinsic": ("ss", "sus", "bonus_share"),
    "losses": ("loss", "contrastive_loss", "alignment_loss", "expectation_loss", "success_loss",
               "world_loss"),
    "training": ("correct", "entropy", "kl")}
FIRST = ("sus", "grpo", "grpo-kl-0.1", "grpo-kl-0.2", "passk", "focal")  # in the legends
# Okabe and Ito's colours, which people with colour blindness can tell apart, and two more.
PALETTE = "#0072B2 #D55E00 #56B4E9 #CC79A7 #009E73 #E69F00 #000000 #999999 #882255 #F0E442".split()
Panels = dict[str, list[tuple]]  # of a figure: heading -> points (name, x, y)


@dataclass
class Run:
    name: str  # the folder's name without the numbers at its end
    seed: int
    config: dict
    metrics: list[dict]
    evaluations: list[dict]
    folder: Path


def read_runs(path: str) -> list[Run]:
    """Every run in a folder, itself included, finished or not."""
    runs = []
    for folder in sorted(file.parent for file in Path(path).rglob("config.json")):
        config = read_json(folder / "config.json")
        metrics = read_lines(folder / "metrics.jsonl")
        evaluations = read_lines(folder / "evaluations.jsonl")
        if "method" in config and evaluations:
            name = setting_name(folder, config.get("data"))
            runs.append(Run(name, config.get("seed", 0), config, metrics, evaluations, folder))
    if not runs:
        raise ValueError(f"no run in {path}: expected a run, or a folder that holds runs")
    return runs


def tell_apart(group: list[Run]) -> None:
    """Runs of one name with different settings are no seeds: those settings join the name."""
    keys = set().union(*(run.config for run in group)) - CHANGEABLE - {"seed"} | {"steps"}
    for key in sorted(keys):
        if len({str(run.config.get(key)) for run in group}) > 1:
            for run in group:
                run.name += f" {key}={run.config.get(key)}"


def find_runs(paths: list[str]) -> list[Run]:
    """The runs in these folders, by name and seed; of a repeated run the longest."""
    runs = [run for path in paths for run in read_runs(path)]
    if len({run.config.get("eval_split") for run in runs}) > 1:
        raise ValueError("runs on test and on validation problems do not belong into one figure")
    for name in {run.name for run in runs}:
        tell_apart([run for run in runs if run.name == name])
    runs.sort(key=lambda run: (run.evaluations[-1]["step"], len(run.metrics)))
    longest = {(run.name, run.seed, run.config.get("cache")): run for run in runs}
    for run in runs:
        if run not in longest.values():
            print(f"left out, since there is a longer run like it: {run.folder}")
    order = [*FIRST, *sorted({run.name for run in runs})]
    return sorted(longest.values(), key=lambda run: (order.index(run.name), run.seed))


def over_steps(runs: list[Run], metrics: tuple[str, ...]) -> Panels:
    lines = [(run.name, line) for run in runs for line in run.evaluations + run.metrics]
    return {f"{metric} by step": [(name, line["step"], line.get(metric)) for name, line in lines]
            for metric in metrics}


def over_temperatures(lines: list[dict]) -> Panels:
    """Means over seeds, on test problems if there are any."""
    splits = [split for split in (*SPLITS[1:], SPLITS[0]) if read_curves(lines, split)]
    curves = read_curves(lines, splits[0])
    return {f"{y} by {x}": [(name, point[x], point[y]) for name, seeds in curves.items()
                            for point in mean_curve(seeds, [x, y])]
            for y, x in known(curves, MATCHED[:2])}


def perfect_entropies(run: Run) -> dict[str, float]:
    """Strategy entropies of policies that are always right, on the run's problems."""
    if run.config.get("data") not in data.COUNTDOWN:
        return {}
    problems = data.load(run.config["data"], run.config["eval_split"], run.config["eval_problems"])
    common = Counter(way for problem in problems for way in problem.strategies)
    one = Counter(max(sorted(problem.strategies), key=common.get) for problem in problems)
    every = Counter()
    for problem in problems:
        every.update({way: 1 / len(problem.strategies) for way in problem.strategies})
    shares = {name: np.array(list(counts.values())) / counts.total()
              for name, counts in (("one way", one), ("all ways", every))}
    return {name: -(share * np.log(share)).sum() for name, share in shares.items()}


def passes(runs: list[Run]) -> Panels:
    curves = [(run.name, run.evaluations[-1]) for run in runs]
    curves += [("base model", run.evaluations[0]) for run in runs if run.name == runs[0].name]
    return {"pass@k by k": [(name, k, share) for name, line in curves
                            for k, share in enumerate(line.get("pass_curve") or [], 1)]}


def embeddings(runs: list[Run]) -> Panels:
    """The base policy's responses, then those of up to three settings after training."""
    files = {"before training": runs[0].folder / "samples-before.jsonl"}
    for run in runs:
        files.setdefault(f"after {run.name}", run.folder / "samples.jsonl")
    panels = {}
    for heading, file in list(files.items())[:4]:
        try:
            panels[heading] = [
                (each.get("strategy", f"cluster {each['cluster']}") or "illegal", *each["place"])
                for record in read_lines(file, key="question") for each in record["responses"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged or of another version: {error!r}") from None
    return panels


def draw_line(axis, name: str, points: list[tuple]) -> None:
    """The mean at each x with its interval; eighty points or more become windows."""
    xs = sorted({x for x, _ in points})
    bands = [mean_and_half([y for other, y in points if other == x]) for x in xs]
    width = max(1, len(xs) // 40)
    xs = xs[width - 1::width]
    means, halves = np.reshape(bands[:width * len(xs)], (-1, width, 2)).mean(axis=1).T
    bars = halves if len(xs) == 1 else None
    label = re.sub("^_", " _", name).replace("$", r"\$")  # neither hidden nor a formula
    line, *_ = axis.errorbar(xs, means, bars, marker="o", markersize=3, capsize=4, label=label)
    axis.fill_between(xs, means - halves, means + halves, color=line.get_color(), alpha=0.25)


def draw_figure(panels: Panels, file: Path, perfect: dict[str, float],
                is_curve: bool = False) -> None:
    try:
        from matplotlib import cycler
        from matplotlib.figure import Figure  # no window, no global state
    except ImportError:
        raise ValueError("figures need matplotlib: pip install matplotlib") from None
    is_map = file.stem == "embeddings"
    figure = Figure((4.2 * len(panels) + 2, 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharex=is_map, sharey=is_map)[0]
    counts = Counter(name for points in panels.values() for name, *_ in points)
    names = [name for name, _ in counts.most_common(len(PALETTE))] if is_map else list(counts)
    for axis, (heading, points) in zip(axes, panels.items()):
        axis.set_prop_cycle(cycler(linestyle=["-", "--", ":"]) * cycler(color=PALETTE))
        axis.set_title(heading.replace("_", " "))
        for name in names:  # also a name without points here, so that it keeps its colour
            own = [(x, y) for other, x, y in points if other == name]
            if is_map:
                axis.scatter([x for x, _ in own], [y for _, y in own], s=5, label=name)
            elif is_curve:
                axis.plot([x for x, _ in own], [y for _, y in own], marker="o", label=name)
                axis.set_xlabel(f"{heading.partition(' by ')[2]}; a point is a temperature")
            else:
                draw_line(axis, name, own)
        for name, level in perfect.items() if heading.startswith("strategy_entropy") else ():
            axis.axhline(level, color="grey", linestyle=":")
            axis.text(axis.get_xlim()[0], level, f" always right, {name}", va="bottom", fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(file, dpi=130)


def draw(runs: list[Run], output: Path) -> list[Path]:
    """Write every figure that these runs can show -> the files."""
    figures = {name: over_steps(runs, metrics) for name, metrics in OVER_STEPS.items()}
    figures |= {"passes": passes(runs), "embeddings": embeddings(runs)}
    output.mkdir(parents=True, exist_ok=True)
    written, perfect = [], perfect_entropies(runs[0])
    for name, panels in figures.items():
        panels = {heading: [point for point in points if isinstance(point[2], int | float)]
                  for heading, points in panels.items()}
        if any(panels.values()):
            written.append(output / f"{name}.png")
            panels = {key: points for key, points in panels.items() if points}
            draw_figure(panels, written[-1], perfect)
    return written


def draw_temperatures(lines: list[dict], file: Path) -> Path:
    panels = over_temperatures(lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    draw_figure(panels, file, {}, is_curve=True)
    return file


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, folders that hold runs, or one file "
                        "of measures")
    parser.add_argument("--output", help="folder for the figures; by default that of the runs")
    arguments = parser.parse_args(argv)
    first = Path(arguments.runs[0])
    with guard():
        if first.is_file():
            if len(arguments.runs) > 1:
                raise ValueError("a file of measures is drawn alone: name one file, or run folders")
            lines = read_lines(first, key="split")
            folder = Path(arguments.output or first.parent)
            drawn = [draw_temperatures(lines, folder / f"{first.stem}.png")]
        else:
            drawn = draw(find_runs(arguments.runs), Path(arguments.output or first))
        print(*drawn, sep="\n")


if __name__ == "__main__":
    main()
