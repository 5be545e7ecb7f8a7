"""Tables that compare settings: each at a temperature of its own, and along its whole curve.

    python -m experiments.compare results/many.jsonl --goals "coverage at equal pass@1"
    python -m experiments.compare results/few.jsonl results/few-again.jsonl

How sharp a policy is can be chosen for free when it is decoded. So a setting's value of a measure
is taken at the temperature that has the best mean on validation problems. Two settings are also
compared at an equal pass@16, coverage or pass@1: each at the place on its curve, interpolated
between temperatures, where it has the most of one measure while the other is at least MATCH of what
the lesser setting can reach. This place is chosen on validation problems too, so that nothing is
chosen by the numbers that are shown.

A line of such a file has name, seed, base, data, split, problems, temperature and measures. Numbers
are means ± half of their 95 % interval over seeds (Student's t); differences are paired by seed,
relative to the second setting's mean. p is that of a paired t-test after Holm's correction over the
comparisons on test problems that were planned as primary and have two seeds or more: against every
GRPO and PRIMARY, in the measures of --goals.
"""
import argparse
import re
from pathlib import Path

import numpy as np

from support.config import Parser, guard
from support.files import read_lines

MEASURES = ("pass@1", "pass@5", "pass@16", "coverage")
MATCHED = (("pass@1", "pass@16"), ("pass@1", "coverage"), ("coverage", "pass@1"))
MATCH = 0.95
PRIMARY = ("passk", "focal", "shuffled", "random")
WAYS_KEPT = "coverage at equal pass@1"
# Student's t, 97.5 %, by degrees of freedom; beyond them 1.96 + 2.5 / degrees is close.
STUDENT = (np.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
SPLITS = ("validation", "test", "test-drawn")
TEXTS, COUNTS = ("name", "base", "data"), ("seed", "problems")
Curves = dict[str, dict[int, list[dict]]]  # setting -> seed -> lines by rising temperature


def setting_name(folder: Path, task: str) -> str:
    """Folders that differ only in the number at the end are seeds of one setting.

    train.py names folders METHOD-DATA-SEED, a repeated run METHOD-DATA-SEED-2.
    """
    return re.sub(r"(-\d+)+$", "", folder.absolute().name).removesuffix(f"-{task}")


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval, which a single value does not have: nan."""
    n = len(values)
    t = STUDENT[n - 1] if n <= len(STUDENT) else 1.96 + 2.5 / (n - 1)
    return np.mean(values), t * np.std(values, ddof=min(1, n - 1)) / np.sqrt(n)


def p_value(differences: list[float]) -> float:
    """Two-sided, of a t-test against zero; the density is summed up to far beyond any use."""
    n, mean = len(differences), np.mean(differences)
    deviation = np.std(differences, ddof=1) / np.sqrt(n)
    if not deviation:
        return float(mean == 0)
    t = abs(mean) / deviation
    x = np.linspace(0, 1000, 1_000_001)
    density = (1 + x * x / (n - 1)) ** (-n / 2)
    return density[x >= t].sum() / density.sum()


def holm(p_values: list[float]) -> list[float]:
    """Holm's correction: the smallest p times their number, the next times one less, and so on."""
    adjusted, largest = list(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


def check_line(line: dict, measures: tuple[str, ...]) -> None:
    """Refuse a line that lacks something, or has something else in its place."""
    sound = {key: type(line.get(key)) is str for key in TEXTS}
    sound |= {key: type(line.get(key)) is int for key in COUNTS}
    sound["split"] = line.get("split") in SPLITS
    sound["temperature"] = type(line.get("temperature")) in (int, float)
    for key in measures:
        sound[key] = type(line.get(key)) in (int, float) and 0 <= line[key] <= 1
    odd = [key for key, is_sound in sound.items() if not is_sound]
    if odd:
        where = ", ".join(f"{key} {line.get(key)}" for key in ("name", "seed", "split"))
        raise ValueError(f"a line to compare is damaged or of another version, see the "
                         f"{', '.join(odd)} of {where}")


def read_curves(lines: list[dict], split: str) -> Curves:
    """What was measured on the problems of a split; refuses runs that do not belong together."""
    if not lines:
        raise ValueError("there is nothing to compare: no run was measured")
    for line in lines:
        check_line(line, MEASURES if "coverage" in lines[0] else MEASURES[:3])
    curves: Curves = {}
    for line in sorted(lines, key=lambda line: line["temperature"]):
        if line["split"] == split:
            curves.setdefault(line["name"], {}).setdefault(line["seed"], []).append(line)
    here = [line for line in lines if line["split"] == split]
    temperatures = {tuple(line["temperature"] for line in curve)
                    for seeds in curves.values() for curve in seeds.values()}
    for name, seeds in curves.items():
        for seed, curve in seeds.items():
            if len({line["temperature"] for line in curve}) < len(curve):
                raise ValueError(f"two runs of {name} have seed {seed}: a run's --seed tells it "
                                 "from the others of its name")
    bases = {(line["seed"], line["base"]) for line in here}
    for what, different in (("tasks", len({line["data"] for line in lines})),
                            ("temperatures", len(temperatures)),
                            ("numbers of problems", len({line["problems"] for line in here})),
                            ("base models for one seed", 1 + len(bases) - len(dict(bases)))):
        if different > 1:
            raise ValueError(f"the runs have different {what} on {split} problems, so they cannot "
                             "be compared")
    return {name: curves[name] for name in dict.fromkeys(line["name"] for line in lines)
            if name in curves}


def known(curves: Curves, measures) -> list:
    """Those of these measures, or pairs of them, that the task has."""
    line = next(iter(next(iter(curves.values())).values()))[0]
    names = {each: (each,) if isinstance(each, str) else each for each in measures}
    return [each for each in measures if line.keys() >= set(names[each])]


def mean_curve(seeds: dict[int, list[dict]], measures=MEASURES) -> list[dict]:
    """A setting's mean over its seeds at each temperature."""
    return [{"temperature": lines[0]["temperature"],
             **{name: np.mean([line[name] for line in lines]) for name in measures}}
            for lines in zip(*seeds.values())]


def choose_temperature(seeds: dict[int, list[dict]], measure: str) -> float:
    """The temperature with the best mean; of equal ones the lowest."""
    curve = mean_curve(seeds, [measure])
    return max(curve, key=lambda line: (line[measure], -line["temperature"]))["temperature"]


def choose_place(curve: list[dict], measure: str, at: str, level: float) -> float:
    """Where along a curve `measure` is highest while `at` is at least this level.

    2.25 is a quarter of the way from the third temperature to the fourth.
    """
    places = {number: line[measure] for number, line in enumerate(curve) if line[at] >= level}
    for number, (a, b) in enumerate(zip(curve, curve[1:])):
        if min(a[at], b[at]) < level < max(a[at], b[at]):
            share = (level - a[at]) / (b[at] - a[at])
            places[number + share] = a[measure] + share * (b[measure] - a[measure])
    return max(places, key=places.get)


def value_at_place(curve: list[dict], measure: str, place: float) -> float:
    number = int(place)
    a, b = (line[measure] for line in (curve[number], curve[min(number + 1, len(curve) - 1)]))
    return a + (place - number) * (b - a)


def values_at(seeds: dict[int, list[dict]], measure: str, temperature: float) -> dict[int, float]:
    return {seed: line[measure] for seed, lines in seeds.items() for line in lines
            if line["temperature"] == temperature}


def differences(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Paired by seed, relative to the mean of theirs."""
    middle = np.mean(list(theirs.values())) or np.nan
    return [(ours[seed] - theirs[seed]) / middle for seed in sorted(ours)]


def matched_differences(ours: dict, theirs: dict, chosen: list[dict], measure: str,
                        at: str) -> list[float]:
    """The same at an equal value of `at`; chosen: both settings' curves on validation problems."""
    curves = [mean_curve(seeds, [measure, at]) for seeds in chosen]
    level = MATCH * min(max(line[at] for line in curve) for curve in curves)
    places = [choose_place(curve, measure, at, level) for curve in curves]
    return differences(*({seed: value_at_place(curve, measure, place)
                          for seed, curve in seeds.items()}
                         for seeds, place in zip((ours, theirs), places)))


def percent(values: list[float], sign: str = "") -> str:
    mean, half = mean_and_half(values)
    digits = 0 if sign else 1
    return f"{100 * mean:{sign}.{digits}f}" + (
        f" ± {100 * half:.{digits}f}" if len(values) > 1 else "")


def name_p(p: float) -> str:
    return f"p {p:.3f}" if p >= 0.001 else "p < 0.001"


def as_table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def settings_table(curves: Curves, validation: Curves) -> str:
    """Every setting at its own temperatures."""
    rows, most = [], max(map(len, curves.values()))
    for name, seeds in curves.items():
        cells = []
        for measure in known(curves, MEASURES):
            temperature = choose_temperature(validation[name], measure)
            values = list(values_at(seeds, measure, temperature).values())
            cells.append(f"{percent(values)} (T {temperature:g})")
        rows.append([name if len(seeds) == most else f"{name} (seeds: {len(seeds)})", *cells])
    return as_table(["per cent", *known(curves, MEASURES)], rows)


def find_best(validation: Curves, prefix: str = "grpo") -> str | None:
    """The setting of a family with the best pass@1 on validation."""
    means = {name: max(line["pass@1"] for line in mean_curve(seeds, ["pass@1"]))
             for name, seeds in validation.items() if name.startswith(prefix)}
    return max(means, key=means.get, default=None)


def common_seeds(*each: dict[int, list[dict]]) -> list[dict[int, list[dict]]]:
    """The same settings, with the seeds alone that all of them have."""
    shared = set.intersection(*(set(seeds) for seeds in each))
    return [{seed: seeds[seed] for seed in sorted(shared)} for seeds in each]


def differences_table(curves: Curves, validation: Curves, goals: tuple[str, ...]) -> str:
    """The first setting over each other one, the best GRPO first."""
    first, *others = curves
    best = find_best(validation)
    rows, planned = {}, {}
    for other in sorted(others, key=lambda name: name != best):
        name = f"{other} (best GRPO)" if other == best else other
        ours, theirs, *chosen = common_seeds(curves[first], curves[other], validation[first],
                                             validation[other])
        if not ours:
            continue
        cells = {measure: differences(*(
            values_at(side, measure, choose_temperature(its_validation, measure))
            for side, its_validation in zip((ours, theirs), chosen)))
            for measure in ("pass@1", "pass@5")}
        cells |= {f"{measure} at equal {at}": matched_differences(ours, theirs, chosen, measure, at)
                  for measure, at in known(curves, MATCHED)}
        rows[name] = cells
        if other in PRIMARY or other.startswith("grpo"):
            planned |= {(name, goal): cells[goal] for goal in goals if goal in cells}
    planned = {key: values for key, values in planned.items()
               if len(values) > 1 and np.isfinite(values).all()}
    p_values = dict(zip(planned, holm([p_value(values) for values in planned.values()])))
    lines = []
    for name, cells in rows.items():
        line = [name]
        for measure, values in cells.items():
            p = p_values.get((name, measure))
            line.append(percent(values, "+") + (f", {name_p(p)}" if p is not None else ""))
        lines.append(line)
    return as_table([f"{first} over, per cent", *next(iter(rows.values()))], lines) if rows else ""


def make_tables(lines: list[dict], goals: tuple[str, ...] = ()) -> str:
    """All tables of a file; without test problems, what was measured on validation."""
    validation = read_curves(lines, "validation")
    splits = [split for split in SPLITS[1:] if read_curves(lines, split)]
    text = ""
    for split in splits or ["validation"]:
        curves = read_curves(lines, split)
        chosen = {name: validation.get(name, curves[name]) for name in curves}
        seeds = max(len(each) for each in curves.values())
        where = "validation" if validation.keys() >= curves.keys() else f"these {split}"
        text += (f"{split} problems, seeds: {seeds}; mean ± half of its 95 % interval; "
                 f"temperatures chosen on {where} problems\n\n"
                 f"{settings_table(curves, chosen)}\n"
                 f"{differences_table(curves, chosen, goals if split == 'test' else ())}\n")
    return text


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+",
                        help="lines as experiments.reproduce writes them; several are joined")
    parser.add_argument("--goals", nargs="+", default=(), choices=(*MEASURES[:2], WAYS_KEPT),
                        help="the measures that were planned as primary")
    arguments = parser.parse_args(argv)
    with guard():
        for file in arguments.files:
            if not file.is_file():
                raise ValueError(f"{file} is not a file of experiments.reproduce")
        lines = [line for file in arguments.files for line in read_lines(file, key="split")]
        print(make_tables(lines, tuple(arguments.goals)))


if __name__ == "__main__":
    main()
