"""Curves over the temperature: measured once, compared by hand-computed numbers."""
import pytest

import evaluate
from experiments import temperatures
from support import files
from tests.test_train import quick_world, run  # noqa: F401 (a fixture)


def curve(*points) -> list[dict]:
    """(temperature, pass@1, coverage) -> lines."""
    return [{"temperature": t, "pass@1": p, "pass@5": p, "pass@16": p, "coverage": c}
            for t, p, c in points]


CURVE = curve((0.3, 0.9, 0.4), (0.6, 0.8, 0.5), (1.0, 0.6, 0.7))


def test_each_measure_has_its_own_best_temperature():
    assert temperatures.choose_temperature(CURVE, "pass@1") == 0.3
    assert temperatures.choose_temperature(CURVE, "coverage") == 1.0
    equal = curve((1.0, 0.5, 0.1), (0.3, 0.5, 0.1))
    assert temperatures.choose_temperature(equal, "pass@1") == 0.3


@pytest.mark.parametrize("accuracy, coverage", [(0.9, 0.4), (0.85, 0.45), (0.7, 0.6), (0.6, 0.7),
                                                (0.95, None), (0.5, None)])
def test_coverage_at_matched_accuracy_is_interpolated_and_never_guessed(accuracy, coverage):
    found = temperatures.interpolate(CURVE, "coverage", "pass@1", accuracy)
    assert found == (coverage if coverage is None else pytest.approx(coverage))


def test_seeds_are_averaged_at_each_temperature():
    other = curve((0.3, 0.7, 0.2), (0.6, 0.8, 0.5), (1.0, 0.4, 0.9))
    mean = temperatures.mean_curve([CURVE, other])
    assert [line["temperature"] for line in mean] == [0.3, 0.6, 1.0]
    assert [line["pass@1"] for line in mean] == pytest.approx([0.8, 0.8, 0.5])
    assert [line["coverage"] for line in mean] == pytest.approx([0.3, 0.5, 0.8])
    table = temperatures.make_table({"sus": mean, "grpo": CURVE})
    assert "| sus | 80.0, 80.0, 80.0, 30.0 |" in table
    assert "| grpo | 90.0," in table
    assert "|  | T 0.3 | T 0.6 | T 1.0 |" in table


def test_a_run_is_measured_once_at_every_temperature(cache, tmp_path, capsys, monkeypatch):
    folder = run(tmp_path / "mine-7", cache, "--steps", "1", "--gate", "none")
    capsys.readouterr()
    command = [str(folder), "--split", "validation", "--problems", "4"]
    temperatures.main(command)
    table = capsys.readouterr().out
    assert "| mine |" in table
    lines = files.read_lines(folder / "temperatures.jsonl", key="split")
    assert [line["temperature"] for line in lines] == [0.3, 0.6, 1.0]
    assert {line["split"] for line in lines} == {"validation"}
    assert all(line["problems"] == 4 and line["samples"] == 16 for line in lines)
    assert lines[0]["distinct"] < lines[2]["distinct"]  # sharper
    monkeypatch.setattr(evaluate, "evaluate", None)  # may not be called again
    temperatures.main(command)
    assert capsys.readouterr().out == table


def test_only_runs_are_measured(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        temperatures.main([str(tmp_path)])
    assert caught.value.code == 2
    assert "is not a run" in capsys.readouterr().err
