"""Kill a training run again and again, resume it each time, and see whether anything was lost.

    python -m tests.torture FOLDER [KILLS] [CACHE]      30 kills and `cache` by default

One run goes through undisturbed. Another is killed at the next of a list of moments, by a signal
that it does not catch, and resumed, over and over. After each kill, every file under its final name
must be whole. In the end everything that was learned (adapters, optimizer, strategy networks and
their memories, lambdas) and written must be as in the undisturbed run, bit for bit.
"""
import os
import random
import shutil
import signal
import sys
import traceback
from itertools import count, cycle
from pathlib import Path
from pkgutil import resolve_name

import data
import train
from support import files, meta

FLAGS = ("--steps 12 --checkpoint-every 4 --eval-every 3 --problems 6 --samples 4 --eval-problems 8"
         " --eval-samples 5 --strategy-warmup 8 --learn-lambdas --device cpu").split()
HALF_FILE, HALF_LINE, RENAMED = "a file is half written", "a line is half written", "after renaming"
ANY_TIME = "any time"
MOMENTS = {  # a function, and at which of its calls the run is killed, at the latest
    HALF_FILE: ("support.files.save_file", 2),
    RENAMED: ("os.replace", 12),
    HALF_LINE: ("support.files.append_line", 4),
    "adapter saved, checkpoint not": ("support.checkpoint.save", 2),
    ANY_TIME: (None, 8),  # seconds
    "rollout": ("support.decoder.Decoder.step", 60),
    "before renaming": ("os.fsync", 12),
    "evaluation": ("evaluate.measure", 2),
    "scoring": ("grpo.score", 20),
    "update": ("grpo.k3", 10),
    "strategy networks": ("strategy.info_nce", 20),
    "learned lambdas": ("support.meta.LearnedLambdas.learn", 2)}


def train_until(moment: str, call: int, flags: list[str]) -> None:
    """Train, and die at this call of the moment's function, if any."""
    data.COUNTDOWN_TRAINING = 40  # more than one epoch
    meta.EVERY = 3  # at a checkpoint the lambdas have a gradient to remember
    if moment == ANY_TIME:
        signal.alarm(call)
    elif moment:
        path, _, name = MOMENTS[moment][0].rpartition(".")
        owner = resolve_name(path)
        original, calls = getattr(owner, name), count(1)

        def deadly(*arguments, **options):
            if next(calls) < call:
                return original(*arguments, **options)
            if moment in (HALF_FILE, HALF_LINE, RENAMED):
                original(*arguments, **options)
            if moment == HALF_FILE:
                os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
            if moment == HALF_LINE:
                os.truncate(arguments[0], os.path.getsize(arguments[0]) - 25)
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(owner, name, deadly)
    train.main(flags)


def run_child(folder: Path, cache: str, moment: str = "", call: int = 0) -> bool:
    """Start or resume the run in this folder -> was it killed?"""
    flags = ["--resume"]
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # it was killed before it had begun
        flags = [*FLAGS, "--cache", cache]
    child = os.fork()  # torch is imported, but has started no thread yet
    if not child:
        become_child(moment, call, ["--run", str(folder), *flags], folder.parent / "child.log")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL, -signal.SIGALRM):
        sys.exit(f"torture: not killed, but failed: {(folder.parent / 'child.log').read_text()}")
    return code != 0


def become_child(moment: str, call: int, flags: list[str], log: Path) -> None:
    """Train in this process, which ends here, whatever happens."""
    log.parent.mkdir(exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    try:
        train_until(moment, call, flags)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def read_run(folder: Path) -> dict:
    """What a run has written, but for times and config.json; half a file would be an error."""
    contents = {}
    for file in folder.rglob("*.*"):
        if file.suffix == ".safetensors":
            for name, tensor in files.read_tensors(file).items():
                contents[file.name, name] = tensor.numpy().tobytes()
        elif file.suffix == ".jsonl":
            key = "question" if file.name.startswith("samples") else "step"
            contents[file.name] = [{name: line[name] for name in line if "second" not in name}
                                   for line in files.read_lines(file, key)]
        elif file.suffix == ".json" and file.name != "config.json":
            contents[file.name] = files.read_json(file)
    return contents


def compare(folder: Path) -> None:
    whole, killed = read_run(folder / "whole"), read_run(folder / "killed")
    different = [name for name in whole | killed if whole.get(name) != killed.get(name)]
    if different:
        sys.exit(f"torture: {len(different)} things differ, the first are {different[:3]}")


def main(folder: Path, kills: int = 30, cache: str = "cache") -> None:
    if kills < 1 or (folder.exists() and any(folder.iterdir())):
        sys.exit("torture: expected at least one kill, and a folder that is new or empty")
    run_child(folder / "whole", cache)
    rng, moments, killed = random.Random(0), cycle(MOMENTS), 0
    while killed < kills:
        moment = next(moments)
        if run_child(folder / "killed", cache, moment, rng.randint(1, MOMENTS[moment][1])):
            read_run(folder / "killed")
            killed += 1
            print(f"kill {killed:3d}: {moment}", flush=True)
        else:  # it went through: start another one
            compare(folder)
            shutil.rmtree(folder / "killed")
    run_child(folder / "killed", cache)
    compare(folder)
    print(f"{kills} kills: every tensor and every line as in the undisturbed run")


if __name__ == "__main__":
    if 2 <= len(sys.argv) <= 4 and all(map(str.isdecimal, sys.argv[2:3])):
        main(Path(sys.argv[1]), *map(int, sys.argv[2:3]), *sys.argv[3:])
    else:
        sys.exit(__doc__)
