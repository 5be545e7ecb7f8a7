"""The tables and figures of RESULTS.md: settings x seeds on Countdown, a process of train.py each.

    python -m experiments.reproduce             main results and ablation
    python -m experiments.reproduce --quick     the first 160 steps of three methods

Settings are chosen (sweep, tune) with seeds from 0 and validation problems, and reported with seeds
from 10 and test problems. Finished runs are kept: after Ctrl-C or a crash the same command goes on.
tables.md has means with 95 % intervals over seeds (Student's t), and differences paired by seed.
"""
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from experiments import plot
from support import checkpoint, files, tiny
from support.config import Config, flag, guard, parse

MAIN = {"sus": "sus", "ss": "ss", "surprise": "surprise",  # name: method and flags
        "perplexity": "perplexity", "oracle": "experiments.rewards:oracle --alpha 4",
        "grpo": "grpo", "grpo-no-kl": "grpo --kl 0", "grpo-kl-0.1": "grpo --kl 0.1",
        "grpo-kl-0.1-rate-0.004": "grpo --kl 0.1 --learning-rate 0.004"}
QUICK = {name: MAIN[name] for name in ("sus", "grpo", "grpo-no-kl")}
SWEEP = {"sus": "sus"} | {name: f"sus --{name.replace('_', '-')}" for name in (
    "alpha=4", "alpha=16", "lambda_ss=0.5", "lambda_ss=2", "lambda_sus=0", "lambda_sus=1",
    "kl=0.01", "kl=0.1")}
TUNE = {name: setting for name, setting in MAIN.items() if name.startswith("grpo")}
TUNE |= {f"grpo-{change.replace('=', '-')}": f"grpo --{change}" for change in (
    "kl=0.01", "kl=0.3", "learning-rate=0.001", "learning-rate=0.004", "normalise=std")}
OTHERS = {"sus": "sus", "no-baseline": "sus --sus-baseline none", "gate-none": "sus --gate none",
          "no-decay": "sus --alpha-decay 0", "equations": "sus --reading equations --gate none",
          "no-warm-up": "sus --strategy-warmup 0", "batch-negatives": "sus --negatives batch",
          "learned-lambdas": "sus --learn-lambdas", "novelty": "experiments.rewards:novelty",
          "gate-correct": "sus --gate correct", "literal": "sus --alpha 0.3 --sus-baseline none "
          "--gate correct --normalise std --strategy-warmup 0 --strategy-updates 1"}
PARTS = {"main": MAIN, "quick": QUICK, "sweep": SWEEP, "tune": TUNE, "others": OTHERS}
SHORT = {"part": "quick", "steps": 160, "seeds": 3, "bases": 1}  # what --quick changes
COLUMNS = ("pass@1", "pass@5", "pass@16", "strategy_entropy", "cluster_entropy")


@dataclass(frozen=True)
class Request:
    part: str = flag("main", "which settings; sweep varies SuS, tune GRPO", choices=tuple(PARTS))
    quick: bool = flag(False, "SuS, GRPO and GRPO without KL: 160 steps, 3 seeds, 1 base model")
    seeds: int = flag(5, "how many seeds", low=1)
    bases: int = flag(5, "how many base models the seeds take in turn; each takes minutes", low=1)
    steps: int = flag(400, "policy updates per run", low=1)
    folder: str = flag("runs/reproduce", "where the runs, tables and figures go")
    cache: str = flag("cache", "folder of the first base model; the next are CACHE-1, CACHE-2, ...")
    workers: int = flag(os.cpu_count() or 1, "runs side by side, with one thread each", low=1)


def plan(request: Request, output: Path) -> dict[Path, list[str]]:
    """The folder of every run of a part, and its flags for train.py."""
    first, split = (0, "validation") if request.part in ("sweep", "tune") else (10, "test")
    jobs = {}
    for number in range(request.seeds):
        base = number % request.bases
        cache = Path(f"{request.cache}-{base}" if base else request.cache).absolute()
        for name, setting in PARTS[request.part].items():
            flags = (f"--method {setting} --seed {first + number} --steps {request.steps} "
                     f"--eval-split {split} --eval-every {max(1, request.steps // 4)}")
            jobs[output / f"{name}-{first + number}"] = [*flags.split(), "--cache", str(cache)]
    return jobs


def is_finished(folder: Path, flags: list[str]) -> bool:
    """Whether a run's last evaluation is there; refuses a run that was made with other settings."""
    wanted, _ = parse(Config, "", flags)
    saved = checkpoint.read_config(folder) or wanted
    names = vars(wanted).keys() - checkpoint.CHANGEABLE | {"steps", "cache"}
    different = [name for name in sorted(names) if getattr(saved, name) != getattr(wanted, name)]
    if different:
        raise ValueError(f"{folder} has other settings ({', '.join(different)}): remove that run")
    return wanted.steps in [line["step"] for line in files.read_lines(folder / "evaluations.jsonl")]


def start(folder: Path, flags: list[str]) -> subprocess.Popen:
    """train.py in a session of its own, so that a Ctrl-C at the terminal reaches it from here."""
    train = Path(__file__).parents[1] / "train.py"
    resume = ["--resume"] if (folder / "config.json").exists() else []
    with open(f"{folder}.log", "w") as log:
        return subprocess.Popen([sys.executable, train, "--run", folder, *flags, *resume],
                                stdout=log, stderr=log, start_new_session=True)


def run_all(jobs: dict[Path, list[str]], workers: int) -> None:
    waiting = [folder for folder, flags in jobs.items() if not is_finished(folder, flags)]
    running = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                folder = waiting.pop(0)
                running[start(folder, jobs[folder])] = folder
            time.sleep(0.5)
            for process in [process for process in running if process.poll() is not None]:
                folder = running.pop(process)
                log = Path(f"{folder}.log")
                if process.returncode:
                    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                    raise ValueError(f"{folder} failed: {last} (the rest is in {log})")
                log.unlink()
                print(f"finished {folder}, {len(waiting) + len(running)} to go")
    finally:
        for process in running:  # they save what they have
            process.terminate()
        for process in running:
            process.wait()


def cell(metric: str, ours: dict[int, dict], theirs: dict[int, dict] | None = None) -> str:
    """Evaluations by seed -> mean ± half its interval; of two, the paired relative difference."""
    form = ".2f" if "entropy" in metric else ".1%"
    values = [line[metric] for line in ours.values()]
    if theirs:
        form = "+.0%"
        middle = plot.mean_and_half([line[metric] for line in theirs.values()])[0] or float("nan")
        values = [(ours[seed][metric] - theirs[seed][metric]) / middle for seed in theirs]
    mean, half = plot.mean_and_half(values)
    interval = f" ± {half:{form.strip('+')}}" if len(values) > 1 else ""
    return f"{mean:{form}}{interval}"


def make_table(runs: list[plot.Run]) -> str:
    """The base models, each setting, and the first setting compared with each other one."""
    final = {}
    for run in runs:
        if None in [run.evaluations[-1].get(metric) for metric in COLUMNS]:
            raise ValueError(f"the last evaluation of {run.folder} lacks a number: remove the run")
        final.setdefault(run.name, {})[run.seed] = run.evaluations[-1]
    first, *others = final
    rows = {"base model": [{run.config["cache"]: run.evaluations[0] for run in runs}]}
    rows |= {name: [final[name]] for name in final}
    rows |= {f"{first} over {name}": [final[first], final[name]] for name in others}
    lines = [["", *(metric.replace("_", " ") for metric in COLUMNS)], ["---"] * (len(COLUMNS) + 1)]
    lines += [[name, *(cell(metric, *sides) for metric in COLUMNS)] for name, sides in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(argv: list[str] | None = None) -> None:
    request, given = parse(Request, __doc__, argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    with guard(lambda: "The same command goes on from here."):
        if request.quick and "part" in given:
            raise ValueError(f"--quick is a part of its own: leave out --part {request.part}")
        if request.quick:
            request = replace(request, **{key: SHORT[key] for key in SHORT.keys() - given})
        output = Path(request.folder, request.part)
        output.mkdir(parents=True, exist_ok=True)
        jobs = plan(request, output)
        for number, cache in enumerate(dict.fromkeys(flags[-1] for flags in jobs.values())):
            tiny.find_tiny("countdown", Path(cache), seed=number)
        run_all(jobs, request.workers)
        runs = plot.find_runs([str(folder) for folder in jobs])
        table = f"{request.steps} steps: mean ± half of its 95 % interval\n\n{make_table(runs)}"
        files.write_text(output / "tables.md", table)
        print(table, output / "tables.md", *plot.draw(runs, output), sep="\n")


if __name__ == "__main__":
    main()
