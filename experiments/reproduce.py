"""The tables and figures of RESULTS.md: settings x base models, a process of train.py each.

    python -m experiments.reproduce --part many     one part; --help lists them
    python -m experiments.reproduce --quick         three methods, 160 steps

part                 settings                        world                    bases, seeds from
many                 SuS, rivals, controls           countdown-many           15, 40
sweep                parts and weights of SuS        countdown-many           15, 40
others               every other reward              countdown-many           15, 40
long                 three, for --steps 1200         countdown-many           15, 40
few                  SuS, rivals, controls           countdown                20, 50
few-again            SuS, GRPO, controls             countdown                25, 55
four                 SuS and rivals                  countdown4               0, 70
calculations         SuS, rivals, controls           countdown-calculations   5, 60
text                 SuS and rivals                  word problems, SmolLM2    -, 80

many-tune, few-tune, calculations-tune (base models and seeds from 0) and many-sus-tune (base models
from 10, seeds from 30) chose the settings on validation problems; the parts above report on test
problems. --quick has base model 0 and seeds from 10. The part text needs a model and a data file
first (RESULTS.md has the commands).
Each run is then measured at several temperatures. Finished runs are kept: after Ctrl-C or a crash
the same command goes on. measures.jsonl has all numbers, tables.md compares them.
"""
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from experiments import compare, plot, temperatures
from support import checkpoint, files, tiny
from support.config import Config, flag, guard, parse

OTHER = "experiments.rewards:"
# What was once another default is written out. For grpo SCALED changes nothing, but finished runs
# have it in their settings.
SCALED = "--bonus scaled --alpha 16 --gate mixed"
PASSK = "--bonus added --gate none --alpha 1 --alpha-decay 0"
GROUP = "--bonus scaled --expectation group --gate correct"
QUERY = "--bonus scaled --expectation query --gate mixed"


def grid(methods: dict[str, str], weights: tuple[float, ...]) -> dict[str, str]:
    """Each method with every KL weight."""
    return {f"{name}-kl-{kl}": f"{flags} --kl {kl}"
            for name, flags in methods.items() for kl in weights}


def pick(settings: dict[str, str], *names: str) -> dict[str, str]:
    return {name: settings[name] for name in names}


def controls(flags: str) -> dict[str, str]:
    """With the settings of SuS."""
    return {"shuffled": f"{OTHER}shuffled {flags}", "random": f"{OTHER}random_embeddings {flags}"}


# name: method and flags
RIVALS = {"grpo": f"grpo {SCALED}", "focal": f"{OTHER}focal {SCALED}",
          "passk": f"{OTHER}passk {PASSK}"}
FALLING = f"grpo {SCALED} --kl 0.1 --kl-decay 0.03"
MANY_TUNE = grid(RIVALS, (0.0, 0.01, 0.03, 0.1)) | {
    "grpo-kl-0.2": f"grpo {SCALED} --kl 0.2", "passk-kl-0.003": f"{OTHER}passk {PASSK} --kl 0.003",
    "focal-alpha=8": f"{OTHER}focal --bonus scaled --alpha 8 --gate mixed --kl 0.0"}
MANY_SUS_TUNE = {f"sus-alpha={alpha}": f"sus {GROUP} --kl 0.03 --alpha {alpha}"
                 for alpha in (4, 8)} | {
    f"sus-alpha={alpha}-constant": f"sus {GROUP} --kl 0.03 --alpha {alpha} --alpha-decay 0"
    for alpha in (1, 4)} | pick(MANY_TUNE, "grpo-kl-0.1", "grpo-kl-0.2", "focal-kl-0.1")
FEW_TUNE = {f"sus-alpha={alpha}": f"sus {QUERY} --kl 0.05 --alpha {alpha}" for alpha in (4, 16)} | {
    f"sus-group-alpha={alpha}": f"sus {GROUP} --kl 0.05 --alpha {alpha}" for alpha in (4, 16)} | (
    grid(RIVALS, (0.03, 0.05, 0.1))) | {
    "grpo-falling": FALLING,
    "passk-kl-0.0": f"{OTHER}passk {PASSK} --kl 0.0",
    "focal-alpha=8": f"{OTHER}focal --bonus scaled --alpha 8 --gate mixed --kl 0.05"}

WAYS = f"{GROUP} --kl 0.03 --alpha 4"  # many-sus-tune chose it
MANY = {"sus": f"sus {WAYS}", "grpo-kl-0.1": MANY_TUNE["grpo-kl-0.1"],
        "grpo-kl-0.2": MANY_TUNE["grpo-kl-0.2"], "focal": MANY_TUNE["focal-kl-0.1"],
        "passk": MANY_TUNE["passk-kl-0.003"], **controls(WAYS)}
BEST = f"{GROUP} --kl 0.05 --alpha 4"  # results/few-sus-tune.jsonl
FEW = {"sus": f"sus {BEST}", "grpo-kl-0.1": FEW_TUNE["grpo-kl-0.1"],
       "focal": FEW_TUNE["focal-alpha=8"], "passk": FEW_TUNE["passk-kl-0.0"],
       **controls(BEST)}
CALCULATIONS_TUNE = {
    **grid({"sus": f"sus {GROUP} --alpha 16"}, (0.05, 0.1, 0.2)),
    "sus-alpha=4": f"sus {GROUP} --alpha 4 --kl 0.1",
    **grid({"grpo": RIVALS["grpo"], "focal": RIVALS["focal"]}, (0.05, 0.1, 0.2)),
    "grpo-falling": FALLING,
    "focal-alpha=4": f"{OTHER}focal --bonus scaled --alpha 4 --gate mixed --kl 0.1",
    **grid({"passk": RIVALS["passk"]}, (0.0, 0.003, 0.01, 0.03))}
CHOSEN = f"{GROUP} --alpha 16 --kl 0.05"  # calculations-tune chose it
CALCULATIONS = {"sus": f"sus {CHOSEN}", "grpo-kl-0.05": CALCULATIONS_TUNE["grpo-kl-0.05"],
                "grpo-falling": FALLING, "focal": CALCULATIONS_TUNE["focal-kl-0.05"],
                "passk": CALCULATIONS_TUNE["passk-kl-0.003"], **controls(CHOSEN)}
QUICK = {"sus": MANY["sus"], "grpo": "grpo --kl 0.03", "shuffled": MANY["shuffled"]}
SWEEP = {"sus": MANY["sus"], "ss": f"ss {WAYS}", "surprise": f"surprise {WAYS}",
         "grpo": QUICK["grpo"]} | {
    name: f"{MANY['sus']} --{name.replace('_', '-')}" for name in (
        "alpha=2", "alpha=8", "lambda_sus=1", "kl=0.01", "kl=0.1")}
OTHERS = {"sus": MANY["sus"]} | {
    name: f"{OTHER}{name} {WAYS}" for name in (
        "novelty", "uniqueness", "repository", "elliptical", "count", "rnd", "flat",
        "group_oracle")} | {
    "perplexity": f"perplexity {WAYS}", "icm": f"{OTHER}icm {WAYS} --reading equations",
    "equations": f"sus {WAYS} --reading equations --gate mixed",
    "learned-lambdas": f"sus {WAYS} --learn-lambdas",
    "passk-kl-0.003": MANY_TUNE["passk-kl-0.003"],
    "unlikeliness": f"{OTHER}unlikeliness --bonus added --gate correct --alpha 0.25 "
                    "--alpha-decay 0 --kl 0.03",
    "smoothing": f"{OTHER}smoothing --bonus added --gate group --alpha 0.02 --alpha-decay 0 "
                 "--kl 0.03",
    "untrained": f"sus {WAYS} --strategy-updates 0 --strategy-warmup 0",
    "k2": f"sus {WAYS} --kl-form k2",
    "literal": "sus --bonus added --alpha 0.3 --alpha-decay 0 --sus-baseline none --gate correct "
               "--expectation query --normalise std --strategy-warmup 0 --strategy-updates 1 "
               "--kl 0.03"}
# Worked examples instead of a chat; bf16 is twice as fast on a CPU that has it.
TEXT_FLAGS = ["--model", "models/smollm2", "--prompt", "plain", "--stop", "\\n", "--instruction",
              Path(__file__).parents[1].joinpath("tools/shots.txt").read_text().strip(),
              *"--dtype bfloat16 --max-new-tokens 24 --problems 8 --micro-batch 8 --kl 0 "
               "--learning-rate 1e-4 --temperature 0.7 --eval-problems 32 "
               "--eval-temperature 0.7".split()]
TEXT = {"sus": f"sus {GROUP} --alpha 4 --strategy-warmup 64", "grpo": "grpo",
        "passk": f"{OTHER}passk {PASSK}"}


@dataclass(frozen=True)
class Part:
    settings: dict[str, str]
    task: str = "countdown-many"
    splits: tuple[str, ...] = ("validation",)
    first_seed: int = 0
    first_base: int = 0
    bases: int = 5  # which the seeds take in turn
    problems: int = 400  # that each run is measured on, per split
    goals: tuple[str, ...] = ()  # measures that were planned as primary
    flags: tuple[str, ...] = ()  # more flags of every run
    at: tuple[float, ...] = temperatures.TEMPERATURES  # at which runs are measured


BOTH = temperatures.SPLITS[:2]  # validation problems choose, test problems report
WAYS_KEPT, SOLVED = (compare.WAYS_KEPT,), ("pass@1", "pass@5")
PARTS = {
    "many": Part(MANY, splits=BOTH, first_seed=40, first_base=15, goals=WAYS_KEPT),
    "sweep": Part(SWEEP, splits=BOTH, first_seed=40, first_base=15),
    "others": Part(OTHERS, splits=BOTH, first_seed=40, first_base=15),
    "long": Part(pick(MANY, "sus", "grpo-kl-0.1", "focal"), splits=BOTH, first_seed=40,
                 first_base=15),
    "few": Part(FEW, "countdown", temperatures.SPLITS, first_seed=50, first_base=20, goals=SOLVED),
    "few-again": Part(pick(FEW, "sus", "grpo-kl-0.1", "shuffled", "random"), "countdown", BOTH,
                      first_seed=55, first_base=25, goals=("pass@1",)),
    "four": Part(pick(FEW, "sus", "grpo-kl-0.1", "focal", "passk"), "countdown4", BOTH,
                 first_seed=70),
    "calculations": Part(CALCULATIONS, "countdown-calculations", BOTH, first_seed=60, first_base=5,
                         problems=340, goals=WAYS_KEPT),
    "text": Part(TEXT, "asdiv-one-step.jsonl", BOTH, first_seed=80, bases=1, problems=85,
                 goals=SOLVED, flags=tuple(TEXT_FLAGS), at=(0.4, 0.7, 1.0)),
    "many-tune": Part(MANY_TUNE),
    "many-sus-tune": Part(MANY_SUS_TUNE, first_seed=30, first_base=10),
    "few-tune": Part(FEW_TUNE, "countdown"),
    "calculations-tune": Part(CALCULATIONS_TUNE, "countdown-calculations", problems=340),
    "quick": Part(QUICK, splits=BOTH, first_seed=10, bases=1, problems=100)}
SHORT = {"part": "quick", "steps": 160, "seeds": 2}  # what --quick changes


@dataclass(frozen=True)
class Request:
    part: str = flag("many", "which settings",
                     choices=tuple(name for name in PARTS if name != "quick"))
    quick: bool = flag(False, "SuS, GRPO and shuffled bonuses: 160 steps, 2 seeds, 1 base model")
    seeds: int = flag(5, "how many seeds; five have a base model of their own", low=1)
    steps: int = flag(400, "policy updates per run", low=1)
    folder: str = flag("runs/reproduce", "where the runs, tables and figures go")
    cache: str = flag("cache", "folder of the first base model; the next are CACHE-1, CACHE-2, ...")
    workers: int = flag(os.cpu_count() or 1, "runs side by side, with one thread each", low=1)


def find_cache(request: Request, base: int) -> Path:
    return Path(f"{request.cache}-{base}" if base else request.cache).absolute()


def plan(request: Request, output: Path) -> dict[Path, list[str]]:
    """The folder of every run of a part, and its flags for train.py."""
    part, jobs = PARTS[request.part], {}
    for number in range(request.seeds):
        cache = find_cache(request, part.first_base + number % part.bases)
        seed = part.first_seed + number
        for name, setting in part.settings.items():
            flags = (f"--method {setting} --data {part.task} --seed {seed} --steps {request.steps} "
                     f"--eval-split {part.splits[-1].removesuffix('-drawn')} "
                     f"--eval-every {max(1, request.steps // 4)}")
            jobs[output / f"{name}-{seed}"] = [*flags.split(), *part.flags, "--cache", str(cache)]
    return jobs


def is_trained(folder: Path, flags: list[str]) -> bool:
    """Whether a run's last evaluation is there; refuses a run that was made with other settings."""
    wanted = checkpoint.settle(parse(Config, "", flags)[0], set())
    saved = checkpoint.read_config(folder) or wanted
    names = vars(wanted).keys() - checkpoint.CHANGEABLE | {"steps", "cache"}
    different = [name for name in sorted(names) if getattr(saved, name) != getattr(wanted, name)]
    if different:
        raise ValueError(f"{folder} has other settings ({', '.join(different)}): remove that run")
    return wanted.steps in [line["step"] for line in files.read_lines(folder / "evaluations.jsonl")]


def next_command(folder: Path, flags: list[str], part: Part) -> list | None:
    """What a run still needs: training, measuring, and the first on a base model also that one."""
    if not is_trained(folder, flags):
        resume = ["--resume"] if (folder / "config.json").exists() else []
        return [Path(__file__).parents[1] / "train.py", "--run", folder, *flags, *resume]
    measure = ["-m", "experiments.temperatures", folder, "--splits", *part.splits, "--problems",
               str(part.problems), "--at", *map(str, part.at)]
    setting, _, seed = folder.name.rpartition("-")
    has_base = setting == next(iter(part.settings)) and int(seed) - part.first_seed < part.bases
    for base in (False, True) if has_base else (False,):
        if not all(temperatures.is_measured(folder, split, part.problems, base, part.at)
                   for split in part.splits):
            return [*measure, *(["--base"] if base else [])]
    return None


def start(command: list, log: Path) -> subprocess.Popen:
    """In a session of its own: a Ctrl-C reaches this program, which then ends its runs."""
    with open(log, "w") as output:
        return subprocess.Popen([sys.executable, *command], stdout=output, stderr=output,
                                cwd=Path(__file__).parents[1], start_new_session=True)


def run_all(jobs: dict[Path, list[str]], part: Part, workers: int) -> None:
    waiting = [folder for folder in jobs if next_command(folder, jobs[folder], part)]
    running = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                folder = waiting.pop(0)
                command = next_command(folder, jobs[folder], part)
                running[start(command, Path(f"{folder}.log"))] = folder, command
            time.sleep(0.5)
            for process in [process for process in running if process.poll() is not None]:
                folder, command = running.pop(process)
                log = Path(f"{folder}.log")
                if process.returncode:
                    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                    raise ValueError(f"{folder} failed: {last} (the rest is in {log})")
                rest = next_command(folder, jobs[folder], part)
                if rest == command:
                    raise ValueError(f"{folder} ended without its results (see {log})")
                log.unlink()
                if rest:
                    waiting.insert(0, folder)
                else:
                    print(f"finished {folder}, {len(waiting) + len(running)} to go", flush=True)
    finally:
        for process in running:  # they save what they have
            process.terminate()
        for process in running:
            process.wait()


def main(argv: list[str] | None = None) -> None:
    request, given = parse(Request, __doc__, argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    with guard(lambda: "The same command goes on from here."):
        if request.quick and "part" in given:
            raise ValueError(f"--quick is a part of its own: leave out --part {request.part}")
        if request.quick:
            request = replace(request, **{key: SHORT[key] for key in SHORT.keys() - given})
        part, output = PARTS[request.part], Path(request.folder, request.part).absolute()
        output.mkdir(parents=True, exist_ok=True)
        tiny_bases = 0 if "--model" in part.flags else min(request.seeds, part.bases)
        for number in range(tiny_bases):
            base = part.first_base + number
            tiny.find_tiny(part.task, find_cache(request, base), seed=base)
        jobs = plan(request, output)
        run_all(jobs, part, request.workers)
        lines = temperatures.read_measures(list(jobs), part.splits, part.at)
        files.write_lines(output / "measures.jsonl", lines)
        table = f"{request.steps} steps, {compare.make_tables(lines, part.goals)}"
        files.write_text(output / "tables.md", table)
        print(table, output / "tables.md", sep="\n")
        runs = plot.find_runs([str(folder) for folder in jobs])
        print(plot.draw_temperatures(lines, output / "temperatures.png"),
              *plot.draw(runs, output), sep="\n")


if __name__ == "__main__":
    main()
