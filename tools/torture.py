"""Kill a training run again and again, resume it each time, and see whether anything was lost.

    python tools/torture.py FOLDER [KILLS] [CACHE]          30 kills by default; a few minutes

One run goes through undisturbed. Another is killed (SIGKILL, which no program can catch) whenever it reaches the next of a
list of moments: in the middle of a rollout, an update, an evaluation, a line of metrics, a checkpoint before, during and after
its renaming; or simply after some seconds. After each kill every file that is visible under its final name must be whole. In
the end checkpoints (adapter, optimizer, strategy networks, both memories, learned weights), adapter and metrics must be those
of the undisturbed run, bit for bit.
"""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

FLAGS = ("--steps 12 --checkpoint-every 3 --eval-every 4 --problems 6 --samples 4 --eval-problems 8 --eval-samples 5 "
         "--train-problems 40 --strategy-warmup 8 --recent 20 --buffer 30 --strategy-batch 4 --kl 0.01 --learn-lambdas "
         "--lambda-every 3 --scale-intrinsic --device cpu").split()
MOMENTS = {"a file is half written": "files.save_file", "after a file was renamed": "os.replace", "a line is half written":
           "files.append_line", "adapter saved, checkpoint not": "checkpoint.write_tensors", "rollout": "sample.draw",
           "before a file is renamed": "os.fsync", "evaluation": "evaluate.measure", "scoring": "grpo.score",
           "update": "grpo.k3", "strategy networks": "strategy.contrast", "learned weights": "meta.LearnedWeights.learn"}
MOST_CALLS = {"rollout": 60, "scoring": 20, "update": 10, "strategy networks": 20, "before a file is renamed": 12,
              "after a file was renamed": 12, "a line is half written": 4}


def be_killed(moment: str, count: int, flags: list[str]) -> None:
    """In the child process: train, and die at the count-th time that the moment comes."""
    import checkpoint, evaluate, files, grpo, meta, sample, strategy, train         # looked up by name below
    *path, name = MOMENTS[moment].split(".")
    owner = {**sys.modules, **locals()}[path[0]]
    for part in path[1:]:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), iter(range(1, 10 ** 9))

    def deadly(*arguments, **options):
        if next(calls) < count:
            return original(*arguments, **options)
        if moment == "a file is half written":
            original(*arguments, **options)
            os.truncate(arguments[1], os.path.getsize(arguments[1]) // 2)
        elif moment == "a line is half written":
            with open(arguments[0], "a") as file:
                file.write(json.dumps(arguments[1])[:25])
        elif moment == "after a file was renamed":
            original(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, deadly)
    if moment == "a line is half written":
        train.append_line = deadly
    train.main(flags)


def check_files(folder: Path) -> None:
    """Nothing under a final name may be half a file; only a JSONL's last line may be cut."""
    from files import read_json, read_lines, read_tensors
    for file in folder.rglob("*"):
        if file.suffix == ".json":
            read_json(file)
        elif file.suffix == ".safetensors":
            read_tensors(file)
        elif file.suffix == ".jsonl":
            read_lines(file, "question" if file.name.startswith("samples") else "step")


def state(folder: Path) -> tuple[dict, list]:
    """All tensors of the checkpoints and the adapter, and the metrics without their times."""
    from files import read_lines, read_tensors
    tensors = {(file.name, name): tensor for file in sorted(folder.rglob("*.safetensors"))
               for name, tensor in read_tensors(file).items()}
    lines = [{name: value for name, value in line.items() if not name.startswith(("seconds_", "tokens_per_second"))}
             for file in ("metrics.jsonl", "evaluations.jsonl") for line in read_lines(folder / file)]
    return tensors, lines


def main(folder: Path, kills: int, cache: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    flags = [*FLAGS, "--cache", cache]
    if kills < 1 or (folder.exists() and any(folder.iterdir())):
        sys.exit("torture.py: expected at least one kill, and a folder that is new or empty")
    whole = subprocess.run([sys.executable, ROOT / "train.py", "--run", folder / "whole", *flags], env=environment,
                           capture_output=True, text=True)
    if whole.returncode:
        sys.exit(f"torture.py: the undisturbed run failed: {whole.stderr.strip().splitlines()[-1]}")
    draw, done, moments, number = random.Random(0), {}, list(MOMENTS), 0
    while sum(done.values()) < kills:
        moment, number = moments[number % len(moments)], number + 1
        count = draw.randint(1, MOST_CALLS.get(moment, 2))
        resume = ["--resume"] if (folder / "killed" / "config.json").exists() else []
        child = [sys.executable, __file__, "--child", moment, str(count), "--run", str(folder / "killed"), *(resume or flags)]
        timeout = draw.uniform(4, 9) if number % 5 == 0 else 600        # every fifth kill comes at any time at all
        try:
            code = subprocess.run(child, env=environment, capture_output=True, timeout=timeout, text=True)
        except subprocess.TimeoutExpired:                   # run() kills it
            moment = "any time"
        else:
            if code.returncode not in (0, -signal.SIGKILL):
                sys.exit(f"torture.py: not killed, but failed: {code.stderr[-2000:]}")
            if code.returncode == 0:                        # it went through: start another one
                compare(folder)
                shutil.rmtree(folder / "killed")
                continue
        check_files(folder / "killed")
        done[moment] = done.get(moment, 0) + 1
        print(f"kill {sum(done.values()):3d}: {moment}", flush=True)
    subprocess.run([sys.executable, ROOT / "train.py", "--run", folder / "killed", "--resume"], check=True, env=environment,
                   capture_output=True)
    compare(folder)
    print("\n".join(f"{moment:28} {count}" for moment, count in sorted(done.items())))
    print(f"{sum(done.values())} kills: every tensor and every line as in the undisturbed run")


def compare(folder: Path) -> None:
    (tensors, lines), (others, other_lines) = state(folder / "whole"), state(folder / "killed")
    odd = sorted(name for name in tensors.keys() | others.keys() if name not in tensors or name not in others
                 or not tensors[name].equal(others[name]))
    if odd or lines != other_lines:
        sys.exit(f"torture.py: {len(odd)} tensors differ, the first are {odd[:3]}; metrics "
                 f"{'differ' if lines != other_lines else 'agree'}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        be_killed(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    elif 2 <= len(sys.argv) <= 4 and not sys.argv[1].startswith("-") and all(n.isdecimal() for n in sys.argv[2:3]):
        main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 30, sys.argv[3] if sys.argv[3:] else "cache")
    else:
        sys.exit(__doc__)
