"""The paper's tables and figures, from scratch on one machine: settings x seeds on Countdown, then statistics.

    python reproduce.py                 main results and ablation, five seeds, each on a base model of its own
    python reproduce.py --quick         the first 160 steps of three methods with three seeds: who falls into the trap
    python reproduce.py --part sweep    sensitivity of SuS to alpha, the two lambdas and KL: validation problems, other seeds
    python reproduce.py --part tune     as many settings of plain GRPO, on the same problems and seeds: the best baseline
    python reproduce.py --part others   literal Algorithm 1, the other reading, gates, learned lambdas: what else was tried

Each run is one process of train.py, as many side by side as there are cores, with one thread each. Whatever is finished is
kept: after Ctrl-C or a crash the same command goes on. Tables are printed and written to tables.md in the part's folder,
figures beside them. Intervals are 95 % (Student's t over seeds; all use the same test problems); differences are paired
by seed, which fixes the training problems, the first adapter and the sampling.
"""
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
import knobs
import plot
import tiny
from files import read_json, read_lines, write_text
from flags import fail, knob, parse

IDLE = "--strategy-updates 0 --strategy-warmup 0"           # these rewards do not ask the strategy networks
MAIN = {"sus": "", "grpo": "--method grpo", "grpo-kl-0.1": "--method grpo --kl 0.1",
        "grpo-kl-0.1-rate-0.004": "--method grpo --kl 0.1 --learning-rate 0.004", "grpo-no-kl": "--method grpo --kl 0",
        "ss": "--method ss", "surprise": "--method surprise", "perplexity": f"--method perplexity {IDLE}",
        "oracle": f"--method oracle --alpha 4 {IDLE}"}
QUICK, QUICK_FORM = {name: MAIN[name] for name in ("sus", "grpo", "grpo-no-kl")}, {"steps": 160, "seeds": 3, "bases": 1}
# Both methods may choose among as many settings on validation problems.
SWEEP = {"sus": "", "alpha=4": "--alpha 4", "alpha=16": "--alpha 16", "lambda_ss=0.5": "--lambda-ss 0.5",
         "lambda_ss=2": "--lambda-ss 2", "lambda_sus=0": "--lambda-sus 0", "lambda_sus=1": "--lambda-sus 1",
         "kl=0.01": "--kl 0.01", "kl=0.1": "--kl 0.1"}
TUNE = {name: f"--method grpo {flags}"
        for name, flags in {"grpo": "", "grpo-kl-0": "--kl 0", "grpo-kl-0.01": "--kl 0.01", "grpo-kl-0.1": "--kl 0.1",
                            "grpo-kl-0.3": "--kl 0.3", "grpo-rate-0.001": "--learning-rate 0.001",
                            "grpo-rate-0.004": "--learning-rate 0.004", "grpo-std": "--normalise std",
                            "grpo-kl-0.1-rate-0.004": "--kl 0.1 --learning-rate 0.004"}.items()}
OTHERS = {"literal": "--alpha 0.3 --sus-baseline none --gate correct --normalise std --strategy-warmup 0 --strategy-updates 1",
          "no-baseline": "--sus-baseline none", "no-decay": "--alpha-decay 0",
          "equations": "--reading equations --gate none", "gate-correct": "--gate correct", "gate-none": "--gate none",
          "no-warm-up": "--strategy-warmup 0", "batch-negatives": "--negatives batch", "learned-lambdas": "--learn-lambdas",
          "layer-2": "--layer 2", "novelty": "--method novelty"}
PAIRS = [("sus", "grpo"), ("sus", "grpo-kl-0.1"), ("sus", "grpo-kl-0.1-rate-0.004"), ("sus", "grpo-no-kl"), ("sus", "perplexity"),
         ("ss", "sus"), ("surprise", "sus"), ("grpo", "sus"), ("oracle", "grpo"), ("oracle", "grpo-kl-0.1"), ("sus", "oracle")]
PARTS = {"main": MAIN, "sweep": SWEEP, "tune": TUNE, "others": OTHERS}
FIRST = 10                              # seeds below it are for choosing settings


@dataclass(frozen=True)
class Config:
    part: str = knob("main", "which table", choices=tuple(PARTS), group="What to run")
    quick: bool = knob(False, "SuS, GRPO and GRPO without KL alone, with three seeds, one base model and 160 steps unless told otherwise")
    seeds: int = knob(5, "how many seeds; the parts that are not main take at most 3", low=1)
    bases: int = knob(5, "how many tiny base models the seeds take in turn; each is built in minutes, and much hangs on it", low=1)
    steps: int = knob(400, "policy updates a run", low=1)
    folder: str = knob("runs/reproduce", "where the runs, tables and figures go", group="Where and how")
    cache: str = knob("cache", "folder of the tiny base model")
    workers: int = knob(0, "processes side by side; 0 takes one a core, or one when there is a GPU", low=0)


@dataclass
class Job:
    name: str
    seed: int
    flags: list[str]
    folder: Path
    steps: int

    def steps_done(self) -> int:
        file = self.folder / "metrics.jsonl"
        return min(self.steps, file.read_bytes().count(b"\n")) if file.exists() else 0

    def finished(self) -> bool:
        """Also makes sure that what is there was made with this job's settings."""
        if not (self.folder / "config.json").exists():
            return False
        wanted, saved = asdict(parse(knobs.Config, "", self.flags)[0]), read_json(self.folder / "config.json")
        odd = [name for name in sorted(wanted.keys() - checkpoint.CHANGEABLE | {"steps"})
               if saved.get(name) != (list(wanted[name]) if isinstance(wanted[name], tuple) else wanted[name])]
        odd += ["cache"] * (Path(str(saved.get("cache"))).name != Path(wanted["cache"]).name)        # another base model
        if odd:
            raise ValueError(f"{self.folder} was made with other settings ({', '.join(odd)}): remove it, or choose another "
                             "--folder")
        evaluations = read_lines(self.folder / "evaluations.jsonl")
        return bool(evaluations) and evaluations[-1]["step"] == self.steps

    def command(self) -> list[str]:
        resume = ["--resume"] if (self.folder / "config.json").exists() else []
        return [sys.executable, str(Path(__file__).with_name("train.py")), "--run", str(self.folder), *self.flags, *resume]


def place(config: Config) -> Path:
    return Path(config.folder) / ("quick" if config.quick else config.part)


def base_of(config: Config, seed: int) -> tuple[Path, int]:
    """Cache folder and seed of the base model that this seed trains."""
    number = seed % FIRST % config.bases
    return Path(f"{config.cache}-{number}" if number else config.cache), number


def plan(config: Config) -> list[Job]:
    """Every run of a part. Choosing takes seeds 0 to 2 and validation problems, reporting other seeds and test problems."""
    if config.quick and config.part != "main":
        raise ValueError(f"--quick is a form of the main part: leave it out, or leave out --part {config.part}")
    choosing, settings = config.part in ("tune", "sweep"), QUICK if config.quick else PARTS[config.part]
    count = config.seeds if config.part == "main" else min(3, config.seeds)
    seeds = range(count) if choosing else range(FIRST, FIRST + count)
    shared = ["--steps", str(config.steps), "--eval-every", str(max(1, config.steps // 4)),
              "--eval-split", "validation" if choosing else "test"]
    return [Job(name, seed, [*flags.split(), *shared, "--seed", str(seed), "--cache", str(base_of(config, seed)[0])],
                place(config) / f"{name}-{seed}", config.steps)
            for seed in seeds for name, flags in settings.items()]


def run_all(jobs: list[Job], workers: int) -> None:
    """As many processes at a time as there are workers; the bar counts policy updates."""
    waiting, running = [job for job in jobs if not job.finished()], {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if workers > 1 else dict(os.environ)
    bar = tqdm(total=sum(job.steps for job in jobs), initial=sum(job.steps_done() for job in jobs), unit="step", smoothing=0.05)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                job.folder.parent.mkdir(parents=True, exist_ok=True)
                with open(f"{job.folder}.log", "w") as log:             # beside the run: train.py wants an empty folder
                    # In a session of its own: a Ctrl-C at the terminal reaches it once, from here.
                    process = subprocess.Popen(job.command(), stdout=log, stderr=log, env=environment, start_new_session=True)
                running[process] = job
            for process in [process for process in running if process.poll() is not None]:
                job = running.pop(process)
                if process.returncode:
                    lines = Path(f"{job.folder}.log").read_text().strip().splitlines()
                    why = [line for line in lines if line.startswith("error:")] or lines
                    raise ValueError(f"{job.folder} failed: {' '.join(why[-1:])} (the whole story is in {job.folder}.log)")
                Path(f"{job.folder}.log").unlink()
            bar.n = sum(job.steps_done() for job in jobs)
            bar.set_postfix_str(", ".join(f"{job.name} {job.seed}" for job in running.values())), time.sleep(0.5)
    finally:
        bar.close()
        for process in running:                             # they save what they have
            process.terminate()
        for process in running:
            process.wait()


def values(runs: list[plot.Run], name: str, metric: str) -> dict[int, float]:
    """One value a seed."""
    return {run.seed: run.final(metric) for run in runs if run.name == name}


def shown(numbers: list[float], metric: str) -> str:
    """The mean, and half the width of its interval if there is one."""
    (mean, half), unit, digits, sign = plot.mean_and_half(numbers), *((1, 2, "") if "entropy" in metric else (100, 1, " %"))
    return f"{unit * mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {unit * half:.{digits}f}") + sign


COLUMNS = {"pass@1": "pass@1", "pass@5": "pass@5", "pass@16": "pass@16", "strategy_entropy": "strategy entropy",
           "cluster_entropy": "cluster entropy"}


def header(columns: dict[str, str]) -> list[str]:
    return ["| | " + " | ".join(columns.values()) + " |", "|---|" + "---|" * len(columns)]


def results_table(runs: list[plot.Run], names: list[str], columns: dict[str, str] = COLUMNS) -> list[str]:
    """The base model, then each name: mean and half the width of the interval over seeds."""
    before = {metric: list({run.seed: run.evaluations[0][metric] for run in runs}.values()) for metric in columns}
    rows = {"base model": [shown(found if len(set(found)) > 1 else found[:1], metric) for metric, found in before.items()]}
    rows |= {name: [shown(list(values(runs, name, metric).values()), metric) for metric in columns] for name in names}
    return header(columns) + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]


def difference_table(runs: list[plot.Run], pairs: list[tuple[str, str]], columns: dict[str, str] = COLUMNS) -> list[str]:
    """Each pair: how much more the first has than the second, relative to the second's mean, with a paired interval."""
    lines = header(columns)
    for ours, theirs in pairs:
        cells = []
        for metric in columns:
            a, b = values(runs, ours, metric), values(runs, theirs, metric)
            seeds = sorted(a.keys() & b.keys())
            middle = sum(b[seed] for seed in seeds) / len(seeds) or math.nan
            mean, half = (100 * x / middle for x in plot.mean_and_half([a[seed] - b[seed] for seed in seeds]))
            cells.append(f"{mean:+.0f} %" + ("" if math.isnan(half) else f" ({mean - half:+.0f} to {mean + half:+.0f})"))
        lines.append(f"| {ours} over {theirs} | {' | '.join(cells)} |")
    return lines


def write_up(config: Config, jobs: list[Job], runs: list[plot.Run]) -> str:
    names, seeds = list(dict.fromkeys(job.name for job in jobs)), sorted({job.seed for job in jobs})
    text = [f"{jobs[0].steps} steps, seeds {', '.join(map(str, seeds))}: mean ± half of the 95 % interval over seeds", "",
            *results_table(runs, names)]
    if config.part == "main":
        text += ["", "Relative to the second (95 % interval of the paired difference):", "",
                 *difference_table(runs, [pair for pair in PAIRS if set(pair) <= set(names)])]
    return "\n".join(text) + "\n"


def main(argv: list[str] | None = None) -> None:
    config, given = parse(Config, __doc__, argv)
    if config.quick:
        config = replace(config, **{name: value for name, value in QUICK_FORM.items() if name not in given})
    for name in ("SIGTERM", "SIGHUP"):                      # as Ctrl-C: the runs are stopped and saved too; nohup stays nohup
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            signal.signal(getattr(signal, name), signal.default_int_handler)
    workers = config.workers or (1 if torch.cuda.is_available() else os.cpu_count())
    folder = place(config)
    try:
        jobs = plan(config)
        for cache, seed in sorted({base_of(config, job.seed) for job in jobs}):
            tiny.find("countdown", cache, seed=seed)        # once, before the others ask for it
        run_all(jobs, workers)
        runs = plot.find_runs([str(job.folder) for job in jobs])
        if bad := [run.folder for run in runs if any(type(run.evaluations[-1].get(metric)) is not float for metric in COLUMNS)]:
            raise ValueError(f"the last evaluation of {bad[0]} lacks numbers: remove that run to make it again")
        table, file = write_up(config, jobs, runs), folder / "tables.md"
        write_text(file, table)
        print(f"\n{table}\nwritten to {file}")
        for file in plot.draw(runs, folder):
            print(file)
    except (ValueError, OSError) as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(f"\nstopped: the same command goes on where {folder} ends")


if __name__ == "__main__":
    main()
