"""Figures from run folders, as PNG files: one look per question.

    python plot.py runs/reproduce/main      every figure that the runs in this folder can tell, into the folder
    python plot.py runs/a runs/b --output figures

Runs whose folders differ only in a number at the end are seeds of one setting: they share a line and a band, the 95 %
interval of their mean. Reads config.json, metrics.jsonl, evaluations.jsonl and samples*.jsonl; needs matplotlib.

    story         pass@1, pass@5 and strategy entropy over training
    passes        pass@k for k up to the number of samples, before and after training
    diversity     entropy of true strategies and of clusters of embeddings over training
    ablation      both parts, either part, none
    intrinsic     SS and SuS over training
    losses        what the policy and the strategy networks minimise
    sensitivity   pass@1 and pass@5 against alpha, lambda_SS and lambda_SuS
    embeddings    strategy embeddings in two dimensions, coloured by true strategy, before and after training
"""
import argparse
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import checkpoint
from files import read_json, read_lines
from flags import Parser, fail

# Okabe and Ito's colours, which people with colour blindness can tell apart.
COLOURS = {"sus": "#0072B2", "grpo": "#D55E00", "oracle": "#000000", "ss": "#009E73", "surprise": "#E69F00",
           "perplexity": "#F0E442", "grpo-kl-0.1": "#CC79A7", "grpo-no-kl": "#56B4E9", "base": "#999999"}
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000", "#999999")
NAMES = {"sus": "SuS", "grpo": "GRPO", "oracle": "oracle", "ss": "SS only", "surprise": "surprise only", "perplexity": "perplexity",
         "grpo-kl-0.1": "GRPO, KL 0.1", "grpo-kl-0.1-rate-0.004": "GRPO, KL 0.1, rate 0.004", "grpo-no-kl": "GRPO without KL",
         "base": "base model"}
WHOLE = COLOURS.keys() - {"ss", "surprise"}                 # no half of SuS: those have a figure of their own
# Student's t, 97.5 %, by degrees of freedom; beyond them 1.96 + 2.5 / degrees is close.
STUDENT = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass
class Run:
    name: str               # the folder's name without the number at its end
    seed: int
    config: dict
    metrics: list[dict]
    evaluations: list[dict]
    folder: Path

    def final(self, metric: str) -> float:
        return self.evaluations[-1][metric]


def find_runs(paths: list[str]) -> list[Run]:
    """Every finished or unfinished run in these folders, themselves included."""
    runs: dict[Path, Run] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise ValueError(f"{path} is not a folder: expected a run of train.py, or a folder that holds runs")
        for file in sorted(path.rglob("config.json")):
            folder, config = file.parent, read_json(file) if (file.parent / "evaluations.jsonl").exists() else {}
            if "method" not in config or not (evaluations := read_lines(folder / "evaluations.jsonl")):
                continue
            own = f"{config['method']}-{Path(str(config.get('data'))).stem}"          # train.py's choice of a name
            name = config["method"] if re.fullmatch(rf"{re.escape(own)}(-\d+)+", folder.name) else re.sub(r"-\d+$", "", folder.name)
            metrics = read_lines(folder / "metrics.jsonl")
            runs[folder.resolve()] = Run(name, config.get("seed", 0), config, metrics, evaluations, folder)
    if not runs:
        raise ValueError(f"no run in {', '.join(paths)}: expected folders with config.json and evaluations.jsonl")
    if len({run.config.get("eval_split") for run in runs.values()}) > 1:
        raise ValueError(f"{', '.join(paths)}: runs on test and on validation problems do not belong into one figure")
    for group in grouped(runs.values()).values():           # one name, other settings: they become part of the name
        keys = set().union(*(run.config for run in group)) - checkpoint.CHANGEABLE - {"seed"} | {"steps"}
        odd = [key for key in sorted(keys) if len({str(run.config.get(key)) for run in group}) > 1]
        for run in group:
            run.name = " ".join([run.name, *(f"{key}={run.config.get(key)}" for key in odd)])
    return list({(run.name, run.seed, run.config.get("cache")): run for run in runs.values()}.values())     # a repeated run is no seed


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval, which a single value does not have: nan."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, (STUDENT[n - 1] if n <= len(STUDENT) else 1.96 + 2.5 / (n - 1)) * deviation / math.sqrt(n)


def grouped(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by name, in the order in which COLOURS lists the known ones."""
    found = {run.name for run in runs}
    names = [name for name in COLOURS if name in found] + sorted(found - COLOURS.keys())
    return {name: [run for run in runs if run.name == name] for name in names}


def colour(name: str, names: list[str]) -> str:
    if name in COLOURS:
        return COLOURS[name]
    known = re.split("[ -]", name)[0]
    taken = sum(re.split("[ -]", other)[0] == known for other in names)
    if known in COLOURS and taken == 1:
        return COLOURS[known]
    free = [shade for shade in PALETTE if shade not in {COLOURS.get(other) for other in names}] or PALETTE
    return free[[other for other in names if other not in COLOURS].index(name) % len(free)]


def band(axis, xs, values: list[list[float]], colour: str, **style) -> None:
    """A line through the means of the values at each x, and the intervals of those means around it."""
    bands = [mean_and_half(column) for column in values]
    axis.plot(xs, [mean for mean, _ in bands], color=colour, **style)
    axis.fill_between(xs, [mean - half for mean, half in bands], [mean + half for mean, half in bands], color=colour,
                      alpha=0.18, linewidth=0)


def curves(axis, runs: list[Run], records: str, key: str, unit: float = 1, smooth: int = 1) -> None:
    """One line a name with its band over seeds."""
    groups = grouped(runs)
    for name, members in groups.items():
        series: dict[int, list[float]] = {}
        for run in members:
            rows = [(row["step"], row[key] * unit) for row in getattr(run, records) if row.get(key) is not None]
            width = min(smooth, len(rows)) or 1
            for i in range(0, len(rows) - width + 1, width):
                window = rows[i:i + width]
                series.setdefault(window[-1][0], []).append(sum(value for _, value in window) / len(window))
        if series:
            steps = sorted(series)
            band(axis, steps, [series[step] for step in steps], colour(name, list(groups)), label=NAMES.get(name, name),
                 linestyle="--" if name == "oracle" else "-", marker="o" if len(steps) < 12 else "", markersize=3)
    axis.set_xlabel("training step"), axis.spines[["top", "right"]].set_visible(False), axis.grid(alpha=0.25)


def panels(count: int, width: float = 4.2, height: float = 3.4):
    from matplotlib.figure import Figure                    # no window, no global state
    figure = Figure(figsize=(width * count, height), layout="constrained")
    return figure, [figure.add_subplot(1, count, i + 1) for i in range(count)]


def line_figure(runs: list[Run], title: str, parts: list[tuple], records: str = "evaluations", smooth: int = 1):
    """parts: (key, heading, unit). The lines are named once, below all panels."""
    parts = [part for part in parts if any(row.get(part[0]) is not None for run in runs for row in getattr(run, records))]
    if not parts:
        return None
    figure, axes = panels(len(parts))
    for axis, (key, heading, unit) in zip(axes, parts):
        curves(axis, runs, records, key, unit, smooth)
        axis.set_title(heading, fontsize=11)
        axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    if len(grouped(runs)) > 1:
        lines = max(axes, key=lambda axis: len(axis.lines)).get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    return figure


def only(runs: list[Run], *names: str) -> list[Run]:
    """Of the main reproduction's many methods those that a figure is about; of other runs all."""
    known = {"sus", "grpo", "grpo-no-kl"} <= {run.name for run in runs} <= NAMES.keys()
    return [run for run in runs if known and run.name in names] or runs


def story(runs: list[Run]):
    return line_figure(only(runs, "sus", "grpo", "grpo-kl-0.1", "grpo-no-kl"), "What training does to a policy's strategies", [
        ("pass@1", "right at the first try (pass@1, %)", 100), ("pass@5", "right within five tries (pass@5, %)", 100),
        ("strategy_entropy", "strategies in use (entropy, nats)", 1)])


def diversity(runs: list[Run]):
    return line_figure(only(runs, *WHOLE), "Diversity over training", [
        ("strategy_entropy", "entropy of true strategies (nats)", 1),
        ("cluster_entropy", "entropy of embedding clusters (nats)", 1)])


def intrinsic(runs: list[Run]):
    shown = [run for run in runs if run.name == "sus"] or [run for run in runs if run.config["method"] == "sus"]
    return line_figure(shown, "The two parts of the intrinsic reward over training (means over all responses)", [
        ("ss", "SS: distance from the expected strategy", 1), ("sus", "SuS: surprise about success", 1),
        ("bonus_share", "share of the advantages that it decides", 1)], "metrics", 10) if shown else None


def losses(runs: list[Run]):
    return line_figure(only(runs, "sus", "grpo"), "Losses over training", [
        ("loss", "policy", 1), ("contrastive_loss", "E, InfoNCE", 1), ("expectation_loss", "E(query)", 1),
        ("success_loss", "P, cross-entropy", 1), ("world_loss", "M, squared error", 1)], "metrics", 10)


def training(runs: list[Run]):
    """What one run can tell about itself, from its metrics alone."""
    return line_figure(runs, f"{runs[0].config['method']}, seed {runs[0].seed}", [
        ("correct", "correct responses (%)", 100), ("entropy", "entropy a token (nats)", 1), ("ss", "SS", 1),
        ("sus", "SuS", 1)],
        "metrics", max(1, len(runs[0].metrics) // 40))


def passes(runs: list[Run]):
    shown = [run for run in only(runs, *WHOLE) if run.evaluations[-1].get("pass_curve")]
    if not (shown := grouped(shown)):
        return None
    figure, (axis,) = panels(1, 5.5, 4)
    lines = {"base": [run.evaluations[0]["pass_curve"] for run in next(iter(shown.values()))]}
    lines |= {name: [run.evaluations[-1]["pass_curve"] for run in members] for name, members in shown.items()}
    for name, found in lines.items():
        columns = [[100 * value for value in column] for column in zip(*found)]
        band(axis, range(1, len(columns) + 1), columns, colour(name, list(lines)), label=NAMES.get(name, name),
             linestyle="--" if name in ("oracle", "base") else "-")
    axis.set_title("How much do more tries help?"), axis.set_xlabel("tries k"), axis.set_ylabel("pass@k (%)")
    axis.legend(frameon=False, loc="lower center", ncols=3, fontsize=8)
    axis.set_ylim(0, 100), axis.grid(alpha=0.25), axis.spines[["top", "right"]].set_visible(False)
    return figure


def ablation(runs: list[Run]):
    groups = {name: [run for run in runs if run.name == name] for name in ("sus", "ss", "surprise", "grpo")}
    groups = {name: members for name, members in groups.items() if members}
    if "sus" not in groups or len(groups) < 3:
        return None
    parts = [part for part in (("pass@1", "pass@1 (%)", 100), ("pass@5", "pass@5 (%)", 100),
                               ("strategy_entropy", "strategy entropy (nats)", 1))
             if all(run.final(part[0]) is not None for members in groups.values() for run in members)]
    figure, axes = panels(len(parts), 3.8, 3.4)
    for axis, (key, heading, unit) in zip(axes, parts):
        for place, (name, members) in enumerate(groups.items()):
            values = [run.final(key) * unit for run in members]
            mean, half = mean_and_half(values)
            axis.bar(place, mean, yerr=None if math.isnan(half) else half, color=COLOURS[name], width=0.65, capsize=4)
            axis.plot([place] * len(values), values, "o", color="white", markeredgecolor="black", markersize=4)
        axis.set_xticks(range(len(groups)), ["both parts" if name == "sus" else NAMES[name] for name in groups], fontsize=8)
        axis.set_title(heading, fontsize=11), axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("What each part is worth after training (bars: mean and 95 % interval; dots: seeds)", fontsize=12)
    return figure


def sensitivity(runs: list[Run]):
    """Runs named by what they change, such as alpha=2; of the seeds those that all of them have."""
    changed: dict[str, dict[float, list[Run]]] = {}
    for run in runs:
        if match := re.fullmatch(r"(alpha|lambda_ss|lambda_sus)=([\d.]+)", run.name):
            changed.setdefault(match[1], {}).setdefault(float(match[2]), []).append(run)
    if not changed:
        return None
    for run in (run for run in runs if run.name == "sus"):
        for key, found in changed.items():
            found.setdefault(run.config[key], []).append(run)
    shared = set.intersection(*({run.seed for run in members} for found in changed.values() for members in found.values()))
    figure, axes = panels(len(changed), 3.8)
    for axis, (key, found) in zip(axes, sorted(changed.items())):
        top = 0.0
        for metric, shade, marker in (("pass@1", PALETTE[0], "o"), ("pass@5", PALETTE[1], "s")):
            points = {value: mean_and_half([100 * (run.final(metric) or 0) for run in members if run.seed in shared or not shared])
                      for value, members in sorted(found.items())}
            means, halves = [m for m, _ in points.values()], [0 if math.isnan(h) else h for _, h in points.values()]
            axis.errorbar(range(len(points)), means, halves, color=shade, marker=marker, capsize=3, label=metric)
            top = max(top, 1.4 * max(means), 1.0)           # two seeds may have intervals far beyond any percentage
        axis.set_xticks(range(len(points)), [f"{value:g}" for value in points])
        axis.set_xlabel({"alpha": "alpha", "lambda_ss": "lambda of SS", "lambda_sus": "lambda of SuS"}[key])
        axis.set_ylim(0, top), axis.grid(alpha=0.25), axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("%"), axes[0].legend(frameon=False)
    figure.suptitle("How much do the weights of the bonus matter?", fontsize=12)
    return figure


def embeddings(runs: list[Run]):
    """The base policy's responses, then those of each method after training, placed by one shared ruler."""
    groups = {name: members[0] for name, members in list(grouped(only(runs, "grpo", "grpo-no-kl", "sus")).items())[:4]}
    first = next(iter(groups.values()))
    wanted = {"before training": first.folder / "samples-before.jsonl",
              **{f"after {NAMES.get(name, name)}": run.folder / "samples.jsonl" for name, run in sorted(groups.items())}}
    places = {heading: [(*response["place"], response.get("strategy", f"cluster {response['cluster']}") or "illegal")
                        for line in read_lines(file, key="question") for response in line["responses"]]
              for heading, file in wanted.items() if file.exists()}
    if not (places := {heading: points for heading, points in places.items() if points}):
        return None
    kinds = [kind for kind, _ in Counter(point[2] for points in places.values() for point in points).most_common()]
    kinds = [kind for kind in kinds if kind != "illegal"]
    shades = dict(zip(sorted(kinds[:9]), PALETTE)) | dict.fromkeys(kinds[9:], "#aaaaaa") | {"illegal": "#dddddd"}
    figure, axes = panels(len(places), 4.2, 4.4)
    for axis, (heading, points) in zip(axes, places.items()):
        for kind, shade in shades.items():
            chosen = [(x, y) for x, y, label in points if label == kind]
            label = kind if kind in kinds[:9] or kind == "illegal" else "other" if kind == kinds[9] else None
            axis.scatter([x for x, _ in chosen], [y for _, y in chosen], s=5, linewidth=0, alpha=0.6, color=shade, label=label,
                         zorder=1 + (kind != "illegal"))
        axis.set_title(heading, fontsize=11), axis.set_xticks([]), axis.set_yticks([])
    limits = [(min(a) - 0.02, max(a) + 0.02) for a in zip(*(point[:2] for points in places.values() for point in points))]
    for axis in axes:
        axis.set_xlim(*limits[0]), axis.set_ylim(*limits[1])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=11, frameon=False, markerscale=3,
                  fontsize=9)
    what = "cluster" if any(kind.startswith("cluster") for kind in kinds) else "true strategy"
    figure.suptitle(f"Strategy embeddings of the responses, coloured by their {what}", fontsize=12)
    return figure


FIGURES = (story, passes, diversity, ablation, intrinsic, losses, sensitivity, embeddings)


def draw(runs: list[Run], output: Path, figures=FIGURES) -> list[Path]:
    """-> the files written; a figure that these runs cannot tell is left out."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("figures need matplotlib: pip install matplotlib") from None
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for make in figures:
        try:
            figure = make(runs)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"the figure {make.__name__} cannot be drawn: a file of {runs[0].folder.parent} is damaged or "
                             f"from another version ({type(error).__name__}: {error})") from None
        if figure is not None:
            written.append(output / f"{make.__name__}.png")
            figure.savefig(written[-1], dpi=130)
    return written


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, or folders that hold runs")
    parser.add_argument("--output", default="", help="folder for the figures; empty takes the first of the runs' folders")
    arguments = parser.parse_args(argv)
    try:
        for file in draw(find_runs(arguments.runs), Path(arguments.output or arguments.runs[0])):
            print(file)
    except (ValueError, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()
