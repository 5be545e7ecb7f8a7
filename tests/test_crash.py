"""Nothing is lost: kills at bad moments, a full disk, two processes on one folder, numbers that
are not numbers, and groups of responses that are all alike."""
import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import data
import evaluate
import grpo
import lora
import sample
import train
from support import checkpoint, clustering, tiny
from tests.conftest import adapted, small_model

ROOT = Path(__file__).parent.parent
QUICK = ["--problems", "6", "--samples", "4", "--eval-problems", "8", "--eval-samples", "5",
         "--strategy-warmup", "8", "--alpha-decay", "0", "--device", "cpu", "--bonus", "added"]
# A run in which every file that checkpoint.save writes after step 2 may have MOST bytes.
FULL_DISK = """
import resource, data, train
from support import checkpoint, clustering
data.COUNTDOWN_TRAINING, clustering.EPOCHS = 40, 2
original = checkpoint.save
def save(folder, step, *learned):
    if step > 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, MOST))
    original(folder, step, *learned)
checkpoint.save = save
train.main(FLAGS)
"""


@pytest.fixture(autouse=True)
def quick_world(monkeypatch):
    """Fewer problems to prepare, and a shorter fit of the clusters."""
    monkeypatch.setattr(data, "COUNTDOWN_TRAINING", 40)
    monkeypatch.setattr(clustering, "EPOCHS", 2)


def flags_of(folder, cache, *flags) -> list[str]:
    return ["--run", str(folder), "--cache", str(cache), *QUICK, *flags]


def run(folder, cache, *flags) -> Path:
    train.main(flags_of(folder, cache, *flags))
    return Path(folder)


def adapter(folder) -> dict:
    return load_file(Path(folder) / "adapter" / "adapter_model.safetensors")


def metrics(folder) -> list[dict]:
    """The lines of metrics.jsonl without their times."""
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def all_finite(folder) -> bool:
    return all(value.isfinite().all() for value in adapter(folder).values())


def contents(folder) -> dict:
    return {file: file.read_bytes() for file in Path(folder).rglob("*.*")}


def test_killed_and_resumed_is_the_same_as_undisturbed(cache, tmp_path):
    """The short form of tests/torture.py."""
    command = [sys.executable, "-m", "tests.torture", tmp_path / "runs", "5", cache]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kills: every tensor and every line" in done.stdout


def test_a_full_disk_is_one_clear_error_and_costs_nothing(cache, tmp_path):
    """Files may not grow beyond a limit that the second checkpoint exceeds: the same errors."""
    four_steps = ["--steps", "4", "--checkpoint-every", "2"]
    whole = run(tmp_path / "whole", cache, *four_steps)
    size = max(file.stat().st_size for file in whole.rglob("*") if file.is_file())
    flags = flags_of(tmp_path / "run", cache, *four_steps)
    code = FULL_DISK.replace("MOST", str(size // 2)).replace("FLAGS", repr(flags))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert last.startswith("error: ") and "step-000004" in last and "--resume" in last
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert list(checkpoint.find_checkpoints(tmp_path / "run")) == [2]
    train.main(["--run", str(tmp_path / "run"), "--resume"])
    assert same(adapter(whole), adapter(tmp_path / "run"))
    assert metrics(whole) == metrics(tmp_path / "run")


def test_a_run_does_not_go_on_with_another_base_model(cache, tmp_path, capsys):
    """One of the same shape, as after a rebuild or on another machine; nothing is touched."""
    folder = run(tmp_path / "run", cache, "--steps", "2")
    other = shutil.copytree(cache, tmp_path / "other")
    file = tiny.base_folder("countdown-many", other) / "model.safetensors"
    moved = {name: tensor + 0.02 for name, tensor in load_file(file).items()}
    save_file(moved, file, {"format": "pt"})
    before = contents(folder)
    resumed = ["--run", str(folder), "--resume", "--steps", "3"]
    for main, flags in ((train.main, resumed), (evaluate.main, [str(folder)])):
        with pytest.raises(SystemExit) as caught:
            main([*flags, "--cache", str(other)])
        assert caught.value.code == 2 and "other weights" in capsys.readouterr().err
        assert contents(folder) == before
    train.main(resumed)
    assert len(metrics(folder)) == 3


def test_a_fingerprint_is_the_base_models():
    own = checkpoint.fingerprint(small_model())
    assert own == checkpoint.fingerprint(adapted())
    assert own == checkpoint.fingerprint(small_model().bfloat16())
    assert own != checkpoint.fingerprint(small_model(seed=1))


def test_a_disk_without_locks_will_do(cache, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")
    monkeypatch.setattr(checkpoint.fcntl, "flock", unsupported)
    assert len(metrics(run(tmp_path / "run", cache, "--steps", "1"))) == 1


def test_a_second_process_is_refused(cache, tmp_path, capsys):
    folder = run(tmp_path / "run", cache, "--steps", "1")
    before = contents(folder)
    held = checkpoint.lock(folder)
    with pytest.raises(SystemExit) as caught:
        train.main(["--run", str(folder), "--resume", "--steps", "2"])
    assert caught.value.code == 2 and "another process" in capsys.readouterr().err
    assert contents(folder) == before
    held.close()
    train.main(["--run", str(folder), "--resume", "--steps", "2"])
    assert len(metrics(folder)) == 2


def test_a_batch_without_a_finite_gradient_is_skipped(cache, tmp_path, monkeypatch):
    original, seen = grpo.accumulate_gradient, []

    def sometimes_broken(model, *arguments):
        result = original(model, *arguments)
        adapters = lora.parameters(model)
        seen.append({name: value.detach().clone() for name, value in adapters.items()})
        if len(seen) == 2:
            next(iter(adapters.values())).grad[0, 0] = torch.inf
        return {**result, "loss": torch.nan} if len(seen) == 3 else result
    monkeypatch.setattr(grpo, "accumulate_gradient", sometimes_broken)
    folder = run(tmp_path / "run", cache, "--steps", "4", "--gate", "none")
    lines = metrics(folder)
    assert [line["skipped"] for line in lines] == [0, 1, 1, 0]
    assert lines[1]["gradient_norm"] is None and lines[2]["loss"] is None
    assert not same(seen[0], seen[1])
    assert same(seen[1], seen[2]) and same(seen[2], seen[3])  # nothing moved in skipped steps
    assert all_finite(folder) and not same(seen[3], adapter(folder))


def test_a_run_that_never_recovers_stops_with_advice(cache, tmp_path, monkeypatch, capsys):
    original = grpo.accumulate_gradient

    def broken(*arguments):
        return {**original(*arguments), "loss": torch.nan}
    monkeypatch.setattr(grpo, "accumulate_gradient", broken)
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "run", cache, "--steps", "20")
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert caught.value.code == 2 and "5 steps in a row" in last and "--learning-rate" in last
    assert len(metrics(tmp_path / "run")) == 5


def test_a_run_that_recovers_every_time_goes_on(cache, tmp_path, monkeypatch):
    """More bad steps than a run may have in a row, but never so many in a row."""
    original, losses = grpo.accumulate_gradient, []

    def sometimes_broken(*arguments):
        metrics = original(*arguments)
        losses.append(metrics["loss"])
        return metrics if len(losses) % 3 == 0 else {**metrics, "loss": torch.nan}
    monkeypatch.setattr(grpo, "accumulate_gradient", sometimes_broken)
    folder = run(tmp_path / "run", cache, "--steps", "9", "--method", "grpo")
    assert [line["skipped"] for line in metrics(folder)] == [1, 1, 0] * 3


@pytest.mark.parametrize("gate", ["mixed", "none"])
@pytest.mark.parametrize("kind, tokens", [("cut off", 2), ("one token", 1), ("identical", 32),
                                          ("empty", 32)])
def test_degenerate_groups_train_without_nan(kind, tokens, gate, cache, tmp_path, monkeypatch):
    """All cut off, all equal, or all empty but for their end token. No group is partly right, so
    behind the gate `mixed` nothing is learned."""
    original = sample.generate

    def degenerate(*arguments):
        rollout = original(*arguments)
        if kind == "identical":
            for value in vars(rollout).values():
                value[:] = value[:1].clone()
        elif kind == "empty":
            rollout = sample.Rollout(
                ids=torch.ones_like(rollout.ids[:, :1]), lengths=torch.ones_like(rollout.lengths),
                logprobs=rollout.logprobs[:, :1].clone(),
                finished=torch.ones_like(rollout.finished))
        return rollout
    monkeypatch.setattr(sample, "generate", degenerate)
    folder = run(tmp_path / "run", cache, "--steps", "3", "--kl", "0.1", "--gate", gate,
                 "--max-new-tokens", str(tokens))
    assert all_finite(folder)
    for line in metrics(folder):
        assert line["skipped"] == 0 and None not in line.values()
        assert line["zero_signal"] == 1
    learned = any(value.any() for name, value in adapter(folder).items() if "lora_B" in name)
    if gate == "mixed" or kind == "cut off":
        assert learned is (gate == "none")
