"""Nothing is lost: killed at awkward moments, a full disk, two processes on one folder, numbers that are not numbers."""
import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import adapted, small_model
from safetensors.torch import load_file, save_file
from test_train import QUICK, adapter, metrics, run, same

import checkpoint
import evaluate
import grpo
import sample
import train

ROOT = Path(__file__).parent.parent


def test_killed_and_resumed_is_the_same_as_undisturbed(cache, tmp_path):
    """The short form of tools/torture.py."""
    done = subprocess.run([sys.executable, ROOT / "tools" / "torture.py", tmp_path / "runs", "5", cache], capture_output=True, text=True)
    assert done.returncode == 0 and "5 kills: every tensor and every line" in done.stdout, done.stdout + done.stderr


def test_a_full_disk_is_one_clear_error_and_costs_nothing(cache, tmp_path):
    """Files may not grow beyond a limit that the second checkpoint exceeds: the same errors as on a full disk."""
    flags = ["--run", str(tmp_path / "run"), "--cache", str(cache), *QUICK, "--steps", "4", "--checkpoint-every", "2"]
    whole = run(tmp_path / "whole", cache, "--steps", "4", "--checkpoint-every", "2")
    size = max(file.stat().st_size for file in whole.rglob("*") if file.is_file())
    code = (f"import resource, checkpoint, train\noriginal = checkpoint.save\ndef save(run):\n    if run.step > 2:\n"
            f"        resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, {size // 2}))\n    original(run)\n"
            f"checkpoint.save = save\ntrain.main({flags!r})")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("error: ") and "step-000004" in last and "--resume" in last, done.stderr
    assert "Traceback" not in done.stderr and not list((tmp_path / "run").rglob("*.tmp"))
    assert [file.name for file in checkpoint.find(tmp_path / "run")] == ["step-000002.safetensors"]
    train.main(["--run", str(tmp_path / "run"), "--resume"])
    assert same(adapter(whole), adapter(tmp_path / "run")) and metrics(whole) == metrics(tmp_path / "run")


def test_a_run_does_not_go_on_with_another_base_model(cache, tmp_path, capsys):
    """One of the same shape, as after a rebuild or on another machine; nothing is touched."""
    folder, other = run(tmp_path / "run", cache, "--steps", "2"), shutil.copytree(cache, tmp_path / "other")
    weights = load_file(other / "tiny-countdown" / "model.safetensors")
    save_file({name: tensor + 0.02 for name, tensor in weights.items()}, other / "tiny-countdown" / "model.safetensors", {"format": "pt"})
    before = {file: file.read_bytes() for file in folder.rglob("*.*")}
    for main, flags in ((train.main, ["--run", str(folder), "--resume", "--steps", "3"]), (evaluate.main, [str(folder)])):
        with pytest.raises(SystemExit) as caught:
            main([*flags, "--cache", str(other)])
        assert caught.value.code == 2 and "other weights" in capsys.readouterr().err
    assert before == {file: file.read_bytes() for file in folder.rglob("*.*")}


def test_a_fingerprint_is_the_base_models():
    own = checkpoint.fingerprint(small_model())
    assert own == checkpoint.fingerprint(adapted()) == checkpoint.fingerprint(small_model().bfloat16())
    assert own != checkpoint.fingerprint(small_model(seed=1))


def test_a_disk_without_links_and_locks_will_do(cache, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")
    monkeypatch.setattr(checkpoint.os, "link", unsupported)
    monkeypatch.setattr(checkpoint.fcntl, "flock", unsupported)
    assert len(metrics(run(tmp_path / "run", cache, "--steps", "1"))) == 1


def test_a_second_process_is_refused(cache, tmp_path, capsys):
    folder = run(tmp_path / "run", cache, "--steps", "1")
    before = sorted((file, file.stat().st_mtime_ns) for file in folder.rglob("*") if file.name != "lock")
    held = checkpoint.lock(folder)
    with pytest.raises(SystemExit) as caught:
        train.main(["--run", str(folder), "--resume", "--steps", "2"])
    assert caught.value.code == 2 and "another process" in capsys.readouterr().err
    assert before == sorted((file, file.stat().st_mtime_ns) for file in folder.rglob("*") if file.name != "lock")
    held.close()
    train.main(["--run", str(folder), "--resume", "--steps", "2"])


def test_a_batch_without_a_finite_gradient_is_skipped(cache, tmp_path, monkeypatch):
    original, seen = grpo.accumulate_gradient, []

    def sometimes_broken(model, *arguments):
        result = original(model, *arguments)
        seen.append({name: value.detach().clone() for name, value in train.lora.parameters(model).items()})
        if len(seen) == 2:
            next(iter(train.lora.parameters(model).values())).grad[0, 0] = torch.inf
        return {**result, "loss": torch.nan} if len(seen) == 3 else result
    monkeypatch.setattr(grpo, "accumulate_gradient", sometimes_broken)
    lines = metrics(run(tmp_path / "run", cache, "--steps", "4"))
    assert [line["skipped"] for line in lines] == [0, 1, 1, 0] and lines[2]["loss"] is None and lines[1]["gradient_norm"] is None
    assert same(seen[1], seen[2]) and same(seen[2], seen[3])               # nothing moved in the skipped steps
    assert all(value.isfinite().all() for value in adapter(tmp_path / "run").values()) and not same(seen[3], adapter(tmp_path / "run"))


def test_a_run_that_never_recovers_stops_with_advice(cache, tmp_path, monkeypatch, capsys):
    original = grpo.accumulate_gradient
    monkeypatch.setattr(grpo, "accumulate_gradient", lambda *arguments: {**original(*arguments), "loss": torch.nan})
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "run", cache, "--steps", "20")
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert caught.value.code == 2 and "5 steps in a row" in last and "--learning-rate" in last
    assert len(metrics(tmp_path / "run")) == 5


@pytest.mark.parametrize("name, flags", [("truncated", ["--max-new-tokens", "2"]), ("one token", ["--max-new-tokens", "1"]),
                                         ("identical", []), ("empty", [])])
def test_degenerate_groups_train_without_nan(name, flags, cache, tmp_path, monkeypatch):
    """All cut off, all equal, or all empty but for their end token."""
    original = sample.generate

    def degenerate(*arguments):
        rollout = original(*arguments)
        if name == "identical":
            for value in vars(rollout).values():
                value[:] = value[:1].clone()
        elif name == "empty":
            rollout = sample.Rollout(torch.ones_like(rollout.ids[:, :1]), torch.ones_like(rollout.lengths),
                                     rollout.logprobs[:, :1].clone(), torch.ones_like(rollout.finished))
        return rollout
    monkeypatch.setattr(sample, "generate", degenerate)
    for gate in ("mixed", "none"):
        folder = run(tmp_path / gate, cache, "--steps", "3", "--kl", "0.1", "--gate", gate, *flags)
        assert all(value.isfinite().all() for value in adapter(folder).values())
        assert all(line["skipped"] == 0 and None not in line.values() for line in metrics(folder))
