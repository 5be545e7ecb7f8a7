"""Two processes on this machine: equal to one where they must be, equal to each other always, and not left hanging."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_train import QUICK, TIMES

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


def start(*command, **options):
    return subprocess.Popen([*TORCHRUN, *map(str, command)], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, **options)


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def train(folder, cache, *flags):
    return start("train.py", "--run", folder, "--cache", cache, *QUICK, "--checkpoint-every", "3", *flags)


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def test_two_processes_agree_with_one_and_with_each_other(cache, tmp_path):
    output = finish(start(ROOT / "tests" / "two_processes.py", tmp_path / "run", cache))
    assert "rank 0 agrees" in output and "rank 1 agrees" in output


def test_a_checkpoint_of_two_goes_on(cache, tmp_path):
    """By two on the same bits as if never stopped, by one with a word about it."""
    finish(train(tmp_path / "whole", cache, "--steps", "7"))
    finish(train(tmp_path / "part", cache, "--steps", "4"))
    output = finish(train(tmp_path / "part", cache, "--steps", "7", "--resume"))
    assert "processes" not in output and "warning" not in output
    assert metrics(tmp_path / "part") == metrics(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / name / "checkpoint" / "step-000007.safetensors") for name in ("part", "whole"))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
    done = subprocess.run([sys.executable, "train.py", "--run", tmp_path / "part", "--resume", "--steps", "8"], cwd=ROOT,
                          env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0 and "written by 2 processes and goes on with 1" in done.stderr
    assert [line["step"] for line in metrics(tmp_path / "part")] == list(range(1, 9))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in /proc")
def test_a_killed_process_brings_the_others_down(cache, tmp_path):
    process, folder = train(tmp_path / "run", cache, "--steps", "2000"), tmp_path / "run"
    begin = time.monotonic()
    while not (folder / "metrics.jsonl").exists() or len(metrics(folder)) < 4:
        assert process.poll() is None and time.monotonic() - begin < 300, process.communicate()[0]
        time.sleep(0.2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    victims = [child for child in children if b"RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes()]
    begin = time.monotonic()
    os.kill(int(victims[0]), signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and time.monotonic() - begin < 60
    assert "a process of this run is gone" in output and "--resume" in output
    reached = len(metrics(folder))
    finish(train(folder, cache, "--steps", str(reached + 3), "--resume"))
    assert [line["step"] for line in metrics(folder)] == list(range(1, reached + 4))
