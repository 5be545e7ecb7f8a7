"""Two processes on this machine: equal to one where they must be, equal to each other always."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import parallel
from tests.test_train import metrics, quick_world, read_lines, resume  # noqa: F401 (a fixture)

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_two_processes_agree_with_one_and_with_each_other(cache, tmp_path):
    """The one real torchrun. What the processes check themselves is in two_processes.py."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = ROOT / "tests" / "support" / "two_processes.py"
    done = subprocess.run([*TORCHRUN, "--", script, tmp_path, cache], cwd=ROOT, env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500)
    assert done.returncode == 0, done.stdout
    assert "rank 0 agrees" in done.stdout
    assert "rank 1 agrees" in done.stdout
    assert_only_one_process_writes(tmp_path)
    assert_an_evaluation_is_shared(tmp_path, done.stdout)
    assert_an_interrupted_run_says_how_to_go_on(tmp_path, done.stdout)
    assert_a_lost_process_is_noticed_and_one_goes_on(tmp_path, done.stdout)


def assert_only_one_process_writes(folder: Path) -> None:
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["again.json", "lost", "oracle", "part", "rnd", "whole"]
    assert [line["step"] for line in read_lines(folder / "whole" / "evaluations.jsonl")] == [0, 4]
    assert [line["step"] for line in metrics(folder / "whole")] == [1, 2, 3, 4]


def assert_an_evaluation_is_shared(folder: Path, output: str) -> None:
    again = json.loads((folder / "again.json").read_text())
    own = json.loads((folder / "whole" / "evaluation.json").read_text())
    assert {**again, "step": 4} == own
    assert output.count(f"written to {folder / 'again.json'}") == 1


def assert_an_interrupted_run_says_how_to_go_on(folder: Path, output: str) -> None:
    command = f"torchrun --nproc-per-node 2 -- train.py --run {folder / 'part'} --resume"
    assert f"stopped. To continue: {command}" in output
    assert output.count("stopped. ") == 1  # rank 0 speaks for all
    assert metrics(folder / "part") == metrics(folder / "whole")


def assert_a_lost_process_is_noticed_and_one_goes_on(folder: Path, output: str) -> None:
    assert "rank 0 has noticed" in output
    command = f"torchrun --nproc-per-node 2 -- train.py --run {folder / 'lost'} --resume"
    assert f"error: a process of this run is gone. To continue: {command}" in output
    assert [line["step"] for line in metrics(folder / "lost")] == [1, 2]
    resume(folder / "lost", "--steps", "3")
    assert [line["step"] for line in metrics(folder / "lost")] == [1, 2, 3]


# Without other processes.


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shares_are_the_whole_list_in_order_and_differ_by_one_at_most(count, world, monkeypatch):
    monkeypatch.setattr(parallel, "world", lambda: world)
    shares = []
    for rank in range(world):
        monkeypatch.setattr(parallel, "rank", lambda rank=rank: rank)
        shares.append(list(parallel.share(range(count))))
    assert sum(shares, []) == list(range(count))
    sizes = [len(each) for each in shares]
    assert max(sizes) - min(sizes) <= 1


def test_one_process_keeps_what_it_has():
    rows = torch.randn(3, 2)
    parameter = torch.nn.Parameter(torch.ones(2))
    parallel.sum_gradients([parameter])
    assert parameter.grad is None
    parameter.grad = torch.ones(2)
    parallel.sum_gradients([parameter])
    assert parameter.grad.tolist() == [1, 1]
    assert parallel.gather(rows) is rows
    assert parallel.gather_values({"a": 1}) == [{"a": 1}]
    assert parallel.gather_lists([1, 2]) == [1, 2]
    assert parallel.share([1, 2]) == [1, 2]
    assert (parallel.rank(), parallel.world()) == (0, 1)
    with parallel.leader_first():
        pass


def test_nothing_is_joined_without_torchrun(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    parallel.start("cpu")
    assert parallel.world() == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    parallel.start("cpu")
    assert parallel.world() == 1


def test_only_words_about_the_network_say_that_a_process_is_lost(monkeypatch):
    closed = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed")
    assert not parallel.is_lost(closed)  # there was nobody to lose
    monkeypatch.setattr(parallel, "world", lambda: 2)
    assert parallel.is_lost(closed)
    assert parallel.is_lost(torch.distributed.DistError("timeout"))
    assert not parallel.is_lost(RuntimeError("shape mismatch"))
