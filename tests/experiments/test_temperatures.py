"""Curves over the temperature: measured once, compared by hand-computed numbers."""
import shutil

import pytest

import data
import evaluate
import train
from experiments import temperatures
from support import files
from support.config import Config
from tests.test_train import quick_world, run  # noqa: F401 (a fixture)


def test_a_run_is_measured_once_at_every_temperature(cache, tmp_path, capsys, monkeypatch):
    folder = run(tmp_path / "mine-7", cache, "--steps", "1", "--gate", "none")
    capsys.readouterr()
    command = [str(folder), "--splits", "validation", "--problems", "4"]
    temperatures.main(command)
    table = capsys.readouterr().out
    assert "| mine |" in table
    lines = files.read_lines(folder / "temperatures.jsonl", key="split")
    assert [line["temperature"] for line in lines] == list(temperatures.TEMPERATURES)
    assert {line["split"] for line in lines} == {"validation"}
    assert all(line["problems"] == 4 and line["samples"] == 16 for line in lines)
    assert lines[0]["distinct"] < lines[-1]["distinct"]  # sharper
    assert all(line["cluster_entropy"] > 0 for line in lines)  # with the run's own clusters
    short = temperatures.read_measures([folder])
    assert [line["pass@1"] for line in short] == pytest.approx(
        [line["pass@1"] for line in lines], abs=1e-5)
    assert {(line["name"], line["seed"], line["base"], line["data"]) for line in short} == {
        ("mine", 0, cache.name, "countdown-many")}
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "evaluate", None)  # may not be called again
        temperatures.main([*command, "--output", str(tmp_path / "all.jsonl")])
        assert capsys.readouterr().out == table
    assert files.read_lines(tmp_path / "all.jsonl", key="split") == short
    temperatures.measure_run(folder, ["validation"], 3)  # another number of problems is not that
    lines = files.read_lines(folder / "temperatures.jsonl", key="split")
    assert [line["problems"] for line in lines] == [3] * 5  # in place of the others
    temperatures.measure_run(folder, ["test"], 3)
    assert len(temperatures.read_measures([folder])) == 10


def test_a_run_that_went_on_or_a_half_written_file_is_measured_again(cache, tmp_path, capsys):
    folder = run(tmp_path / "mine-7", cache, "--steps", "2", "--gate", "none", "--alpha-decay", "0")
    temperatures.measure_run(folder, ["validation"], 3)
    assert temperatures.is_measured(folder, "validation", 3)
    assert not temperatures.is_measured(folder, "test", 3)
    assert not temperatures.is_measured(folder, "validation", 4)
    file = folder / "temperatures.jsonl"
    text = file.read_text()
    file.write_text("".join(text.splitlines(keepends=True)[:3]) + text[:40])
    assert not temperatures.is_measured(folder, "validation", 3)
    temperatures.measure_run(folder, ["validation"], 3)
    assert file.read_text() == text
    train.main(["--run", str(folder), "--resume", "--steps", "3"])
    assert not temperatures.is_measured(folder, "validation", 3)


def test_base_models_are_measured_beside_their_runs(cache, policy, tmp_path, capsys):
    folder = run(tmp_path / "mine-7", cache, "--steps", "2", "--gate", "none", "--learning-rate",
                 "0.1")
    capsys.readouterr()
    command = [str(folder), "--splits", "validation", "--problems", "4"]
    temperatures.main(command)
    temperatures.main([*command, "--base"])
    base = files.read_lines(folder / "base.jsonl", key="split")
    trained = files.read_lines(folder / "temperatures.jsonl", key="split")
    assert len(base) == len(trained) == len(temperatures.TEMPERATURES)
    config = Config(eval_temperature=0.2)
    alone = evaluate.evaluate(policy, data.load("countdown-many", "validation", 4), config).metrics
    for name in ("pass@1", "valid", "distinct"):
        assert base[0][name] == alone[name]
    assert 0 < alone["distinct"] < 1 and trained[0]["distinct"] != base[0]["distinct"]
    assert base[0]["cluster_entropy"] != alone["cluster_entropy"]  # the run's clusters, not its own
    assert {line["name"] for line in temperatures.read_measures([folder])} == {"mine", "base model"}
    other = shutil.copytree(folder, tmp_path / "other-7")  # on the same base model
    lines = temperatures.read_measures([folder, other])
    assert [line["name"] for line in lines].count("base model") == 5
    assert len(lines) == 15
    assert temperatures.read_measures([folder], ("test",)) == []


def test_a_number_of_problems_must_be_positive(tmp_path, capsys):
    with pytest.raises(SystemExit):
        temperatures.main([str(tmp_path), "--problems", "0"])
    assert "expected 1 or more" in capsys.readouterr().err


def test_other_temperatures_are_measured_in_their_order(cache, tmp_path, capsys):
    folder = run(tmp_path / "mine-7", cache, "--steps", "1", "--gate", "none")
    command = [str(folder), "--splits", "validation", "--problems", "3", "--at"]
    temperatures.main([*command, "1", "0.5"])
    lines = files.read_lines(folder / "temperatures.jsonl", key="split")
    assert [line["temperature"] for line in lines] == [0.5, 1.0]
    assert temperatures.find_measured(folder, "validation", 3, at=(0.5, 1.0)) == lines
    assert not temperatures.is_measured(folder, "validation", 3)
    temperatures.main([*command, "0.7"])  # what was measured stays
    kept = files.read_lines(folder / "temperatures.jsonl", key="split")
    assert [line["temperature"] for line in kept] == [0.5, 0.7, 1.0]
    assert [kept[0], kept[2]] == lines
    short = temperatures.read_measures([folder], at=(0.5, 1.0))
    assert [line["temperature"] for line in short] == [0.5, 1.0]
    for wrong in ("-1", "1e-9", "nan", "inf"):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            temperatures.main([*command, wrong])
        assert "--at: expected temperatures" in capsys.readouterr().err


def test_only_runs_are_measured(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        temperatures.main([str(tmp_path)])
    assert caught.value.code == 2
    assert "is not a run" in capsys.readouterr().err
