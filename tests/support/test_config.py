"""Flags: limits, the manual, presets, saved configs, and errors of one line."""
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import pytest
import torch

import train
from support import config, parallel
from support.config import Config
from tests.test_train import quick_world, run  # noqa: F401 (a fixture)

ROOT = Path(__file__).parent.parent.parent


def error_of(capsys) -> str:
    """The only line that was printed, without what it begins with."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


BAD = [
    (["--steps", "0"], "--steps"), (["--steps", "-5"], "--steps"),
    (["--steps", "many"], "whole number"), (["--steps", "2.5"], "whole number"),
    (["--samples", "1"], "--samples"), (["--learning-rate", "0"], "--learning-rate"),
    (["--learning-rate", "-1"], "--learning-rate"), (["--learning-rate", "nan"], "nan"),
    (["--learning-rate", "1e39"], "--learning-rate"), (["--learning-rate", "fast"], "a number"),
    (["--kl", "inf"], "inf"), (["--kl", "1e40"], "--kl"), (["--temperature", "0"], "--temperature"),
    (["--problems", "0"], "--problems"), (["--rank", "0"], "--rank"),
    (["--rank", "99999"], "--rank"),
    (["--eval-samples", "9" * 20], "--eval-samples"), (["--eval-problems", "0"], "--eval-problems"),
    (["--nonsense"], "--nonsense"), (["--step", "5"], "--step"), (["word"], "word"),
    (["--steps"], "--steps"), (["--data", "chess"], "chess"),
    (["--data", "nowhere:problems"], "nowhere"), (["--data", "data:nothing"], "nothing"),
    (["--method", "magic"], "magic"),
    (["--method", "nowhere:reward"], "nowhere"), (["--method", "reward:nothing"], "nothing"),
    (["--method", "reward:METHODS"], "METHODS"), (["--method", ""], "--method"),
    (["--normalise", "max"], "max"), (["--model", "./nowhere"], "./nowhere"),
    (["--model", "no/such-model"], "no/such-model"), (["--model", ""], "--model"),
    (["--model", "weights.gguf"], "GGUF"), (["--device", "tpu"], "tpu"),
    (["--max-new-tokens", "120"], "context of 128"), (["--resume"], "--resume"),
    (["--seed", "-1"], "--seed"), (["--seed", str(2 ** 32)], "--seed"),
    (["--dtype", "int8"], "int8"), (["--alpha", "-1"], "--alpha"), (["--gate", "open"], "open"),
    (["--encoder", "./nowhere"], "./nowhere"), (["--alpha-decay", "1.5"], "--alpha-decay"),
    (["--learn-lambdas", "--method", "grpo"], "--learn-lambdas"),
    (["--bonus", "scaled", "--gate", "none"], "--bonus added"),
    (["--bonus", "scaled", "--gate", "group"], "--bonus added"),
    (["--learn-lambdas", "--method", "ss"], "--learn-lambdas"),
    (["--encoder", "./nowhere", "--method", "grpo"], "--encoder"),
    (["--problems", "9" * 11], "--problems"), (["--samples", "9" * 11], "--samples"),
    (["--instruction", "\udcff"], "UTF-8"), (["--run", "\udcff"], "UTF-8"),
    (["--prompt", "chat"], "chat template"), (["--system", "Be brief."], "--system"),
    (["--preset", "mine"], "mine")]


@pytest.mark.parametrize("flags, word", BAD, ids=[" ".join(flags) for flags, _ in BAD])
def test_bad_flags_are_one_line_and_touch_nothing(flags, word, cache, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "run", cache, *flags)
    assert caught.value.code == 2
    assert word in error_of(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["train-problems", "recent", "buffer", "strategy-batch", "targets",
                                  "layer", "schedule", "warmup", "loss", "rebuild", "lora-alpha"])
def test_flags_of_older_versions_are_gone(name, capsys):
    with pytest.raises(SystemExit):
        train.main([f"--{name}", "1"])
    assert f"--{name}" in error_of(capsys)


def test_help_is_a_manual(capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert train.__doc__.splitlines()[0] in text
    words = " ".join(text.split())
    for each in fields(Config):
        assert f"--{each.name.replace('_', '-')}" in text
        assert " ".join(each.metadata["help"].split()) in words, each.name
        if each.default not in ("", False):
            assert f"(default {each.default})" in words, each.name
        if each.metadata["group"]:
            assert f"{each.metadata['group']}:" in text


def test_a_percent_sign_in_a_help_text_is_harmless(capsys):
    @dataclass(frozen=True)
    class Small:
        share: float = config.flag(0.5, "100 % of it", high=1)
    with pytest.raises(SystemExit):
        config.parse(Small, "", ["--help"])
    assert "100 % of it (default 0.5)" in capsys.readouterr().out


def test_every_default_and_every_preset_keeps_its_own_limits():
    for preset, values in config.PRESETS.items():
        chosen = config.with_preset(Config(preset=preset), set())
        assert {name: getattr(chosen, name) for name in values} == values
        assert config.from_saved(Config, asdict(chosen), "") == chosen


def test_what_was_typed_wins_over_a_preset():
    typed, given = config.parse(Config, "", ["--preset", "paper", "--steps", "7", "--kl", "0.03"])
    assert given == {"preset", "steps", "kl"}
    chosen = config.with_preset(typed, given)
    assert chosen.steps == 7
    assert chosen.kl == 0.03  # the default, but it was asked for
    assert chosen.data == "gsm8k"
    assert chosen.gate == "correct"


def test_every_flag_sets_its_field():
    for each in fields(Config):
        name = f"--{each.name.replace('_', '-')}"
        limits, default = each.metadata, each.default
        if type(default) is bool:
            found, given = config.parse(Config, "", [name])
            expected = True
        else:
            choices = [choice for choice in limits["choices"] if choice != default]
            expected = choices[0] if choices else "text"
            if type(default) in (int, float):
                expected = type(default)(limits["high"])
            found, given = config.parse(Config, "", [name, str(expected)])
        assert getattr(found, each.name) == expected
        assert given == {each.name}
        assert replace(found, **{each.name: default}) == Config()


@pytest.mark.parametrize("name, limit, beyond", [
    ("steps", 1, 0), ("samples", 2, 1), ("seed", 0, -1), ("seed", 2 ** 32 - 1, 2 ** 32),
    ("alpha_decay", 1.0, 1.01), ("alpha_decay", 0.0, -0.01), ("rank", 1, 0), ("kl", 0.0, -1e-9)])
def test_limits_are_where_they_are_said_to_be(name, limit, beyond, capsys):
    flag = f"--{name.replace('_', '-')}"
    assert getattr(config.parse(Config, "", [f"{flag}={limit}"])[0], name) == limit
    with pytest.raises(SystemExit):
        config.parse(Config, "", [f"{flag}={beyond}"])
    assert str(beyond) in error_of(capsys)


def test_flags_cannot_be_abbreviated(capsys):
    with pytest.raises(SystemExit):
        config.parse(Config, "", ["--lear", "0.1"])
    assert "--lear" in error_of(capsys)


def test_only_some_flags_and_a_positional_argument():
    @dataclass(frozen=True)
    class Small:
        path: str = config.flag("", "where")
        count: int = config.flag(3, "how many")
        other: int = config.flag(4, "not for this command")
    found, given = config.parse(Small, "", ["here", "--count", "5"], "path", {"path", "count"})
    assert found == Small("here", 5, 4)
    assert given == {"path", "count"}
    with pytest.raises(SystemExit):
        config.parse(Small, "", ["here", "--other", "5"], "path", {"path", "count"})


SAVED = [({"steps": "5"}, "steps"), ({"steps": 5.0}, "steps"), ({"steps": True}, "steps"),
         ({"learning_rate": None}, "learning_rate"), ({"kl": float("nan")}, "kl"),
         ({"kl": 10 ** 400}, "kl"), ({"samples": 1}, "samples"), ({"seed": [0]}, "seed"),
         ({"model": None}, "model"), ({"dtype": "int8"}, "dtype"), ({"resume": 1}, "resume"),
         ({"gate": "open"}, "gate"), ({"nonsense": 1}, "nonsense")]


@pytest.mark.parametrize("changes, word", SAVED, ids=[str(list(case)) for case, _ in SAVED])
def test_a_saved_config_is_held_to_the_same_limits(changes, word):
    saved = json.loads(json.dumps(asdict(Config()) | changes))
    with pytest.raises(ValueError, match=word) as caught:
        config.from_saved(Config, saved, "runs/x/config.json")
    assert "runs/x/config.json" in str(caught.value)


def test_a_saved_config_comes_back_and_one_without_a_field_does_not():
    saved = json.loads(json.dumps(asdict(Config(steps=7, kl=0))))
    assert config.from_saved(Config, saved, "") == Config(steps=7, kl=0)
    saved.pop("gate")
    with pytest.raises(ValueError, match="another version.*gate"):
        config.from_saved(Config, saved, "")


@pytest.mark.parametrize("error, code, words", [
    (ValueError("what was wrong"), 2, "what was wrong"),
    (ValueError("two\nlines"), 2, "two lines"),
    (FloatingPointError("not finite"), 2, "not finite"),
    (OSError(28, "No space left on device"), 2, "No space left on device. To continue: this way"),
    (MemoryError(), 2, "--micro-batch"),
    (torch.OutOfMemoryError("CUDA"), 2, "--micro-batch"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "not enough memory")])
def test_a_users_mistake_is_one_line_and_exit_code_2(error, code, words, capsys):
    with pytest.raises(SystemExit) as caught:
        with config.guard(lambda: "To continue: this way"):
            raise error
    assert caught.value.code == code
    assert words in error_of(capsys)


def test_real_requests_for_too_much_memory_are_recognised(capsys):
    with pytest.raises(SystemExit):
        with config.guard():
            torch.zeros(2 ** 62)
    assert "not enough memory" in error_of(capsys)


def test_ctrl_c_is_exit_code_130_and_says_how_to_go_on(capsys):
    with pytest.raises(SystemExit) as caught:
        with config.guard(lambda: "To continue: this way"):
            raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == "\nstopped. To continue: this way\n"


def test_sigterm_is_like_ctrl_c_while_a_command_runs(capsys):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        with config.guard(lambda: "To continue: this way"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 130
    assert "To continue: this way" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_developers_see_the_traceback_of_a_mistake():
    code = "from support.config import guard\nwith guard(): int('x')"
    for options, shown in (([], False), (["-X", "dev"], True)):
        done = subprocess.run([sys.executable, *options, "-W", "ignore", "-c", code], cwd=ROOT,
                              capture_output=True, text=True)
        assert ("Traceback" in done.stderr) is shown
        assert "invalid literal" in done.stderr


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug"), AssertionError()])
def test_a_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        with config.guard():
            raise error


def test_a_lost_process_is_named(monkeypatch, capsys):
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer")
    monkeypatch.setattr(parallel, "world", lambda: 2)
    with pytest.raises(SystemExit) as caught:
        with config.guard(lambda: "To continue: this way"):
            raise lost
    assert caught.value.code == 2
    assert error_of(capsys) == "a process of this run is gone. To continue: this way"


def test_more_processes_than_problems_are_refused(monkeypatch):
    monkeypatch.setattr(parallel, "world", lambda: 5)
    config.check_config(Config(problems=5))
    with pytest.raises(ValueError, match="--problems 4"):
        config.check_config(Config(problems=4))
