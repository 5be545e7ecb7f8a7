"""Figures from made-up runs: what is drawn, from which files, and what bad folders say."""
import builtins
import json
import math
import sys
from types import SimpleNamespace

import pytest
from PIL import Image

from experiments import plot, reproduce

ALL = {"story", "diversity", "intrinsic", "losses", "training", "passes", "embeddings"}


def write_lines(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(folder, method, seed, shift=0.0, steps=20, **changes):
    """A run folder as train.py leaves it; without the intrinsic metrics if the method is grpo."""
    folder.mkdir(parents=True)
    config = {"method": method, "seed": seed, "alpha": 4.0, "lambda_ss": 1.0, "lambda_sus": 0.5,
              "kl": 0.03, "data": "countdown", "eval_split": "test", "eval_problems": 8,
              "cache": f"/cache-{seed}"}
    (folder / "config.json").write_text(json.dumps(config | changes))
    intrinsic = {} if method == "grpo" else {"ss": 0.5, "sus": 0.2, "bonus_share": 0.1}
    write_lines(folder / "metrics.jsonl", [
        {"step": step, "loss": 0.1, "correct": step / 40, "entropy": 0.5, "kl": 0.0, **intrinsic}
        for step in range(1, steps + 1)])
    write_lines(folder / "evaluations.jsonl", [
        {"step": step, "pass@1": step / 40 + shift, "pass@5": step / 30 + shift,
         "pass@16": step / 20 + shift, "strategy_entropy": 2 - step / 20, "cluster_entropy": 1.5,
         "pass_curve": [step / 40 + shift, step / 20 + shift]} for step in range(0, steps + 1, 10)])
    for name in ("samples-before", "samples"):
        responses = [{"text": "t", "correct": 1.0, "cluster": 0, "place": [seed, 1.0],
                      "strategy": strategy} for strategy in ("++", None)]
        write_lines(folder / f"{name}.jsonl", [{"question": "q", "responses": responses}])


def names_and_seeds(runs):
    found = {}
    for run in runs:
        found.setdefault(run.name, []).append(run.seed)
    return found


def panels_of(monkeypatch, runs, folder):
    """What each figure of these runs shows: {figure: panels}."""
    drawn = {}
    monkeypatch.setattr(plot, "draw_figure",
                        lambda panels, file, perfect: drawn.update({file.stem: panels}))
    plot.draw(runs, folder)
    return drawn


def test_runs_are_grouped_and_every_figure_is_drawn(tmp_path):
    for seed in (1, 2, 3):
        for method in ("sus", "grpo", "ss", "surprise"):
            make_run(tmp_path / f"{method}-{seed}", method, seed, 0.01 * seed)
        make_run(tmp_path / f"alpha=2-{seed}", "sus", seed, alpha=2.0)
    runs = plot.find_runs([str(tmp_path)])
    assert len(runs) == 15
    assert list(names_and_seeds(runs)) == ["sus", "grpo", "alpha=2", "ss", "surprise"]
    files = plot.draw(runs, tmp_path / "figures")
    assert {file.stem for file in files} == ALL
    for file in files:
        with Image.open(file) as image:
            assert image.format == "PNG" and min(image.size) > 300
            assert len(image.convert("RGB").getcolors(10 ** 6)) > 20
    assert "matplotlib.pyplot" not in sys.modules  # no window, no global state


def test_a_single_run_has_every_figure(tmp_path, capsys):
    make_run(tmp_path / "sus-1", "sus", 1)
    plot.main([str(tmp_path / "sus-1"), "--output", str(tmp_path / "one")])
    written = {file.stem for file in (tmp_path / "one").iterdir()}
    assert written == ALL
    assert set(capsys.readouterr().out.split()) == set(map(str, (tmp_path / "one").iterdir()))
    plot.main([str(tmp_path / "sus-1")])
    assert (tmp_path / "sus-1" / "training.png").exists()  # beside the run, if nothing is said


def make_measures(names=("sus", "base model")) -> list[dict]:
    """Lines of two seeds at two temperatures, the settings 0.3 apart in pass@1."""
    return [{"name": name, "seed": seed, "base": f"cache-{seed}", "data": "countdown",
             "split": split, "problems": 10, "temperature": t, "pass@16": 0.5 + t / 10,
             "pass@5": 0.4,
             "pass@1": (0.5 if split == "test" else 0.0) - t / 10 + 0.3 * number + seed / 10,
             "coverage": 0.2}
            for number, name in enumerate(names) for seed in (1, 2) for t in (0.2, 1.0)
            for split in ("validation", "test")]


def test_curves_over_the_temperature_are_means_over_seeds():
    """On test problems, and on validation problems where there are no others."""
    drawn = plot.over_temperatures(make_measures())
    assert drawn["pass@1 by pass@16"] == [
        ("sus", pytest.approx(0.52), pytest.approx(0.63)),
        ("sus", pytest.approx(0.6), pytest.approx(0.55)),
        ("base model", pytest.approx(0.52), pytest.approx(0.93)),
        ("base model", pytest.approx(0.6), pytest.approx(0.85))]
    assert [x for _, x, _ in drawn["pass@1 by coverage"]] == pytest.approx([0.2] * 4)
    drawn = plot.over_temperatures([line for line in make_measures() if line["split"] != "test"])
    assert drawn["pass@1 by pass@16"][0] == ("sus", pytest.approx(0.52), pytest.approx(0.13))


def test_a_file_of_measures_is_drawn(tmp_path, capsys):
    write_lines(tmp_path / "main.jsonl", make_measures())
    plot.main([str(tmp_path / "main.jsonl")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "main.png")
    plot.main([str(tmp_path / "main.jsonl"), "--output", str(tmp_path / "figures")])
    with Image.open(tmp_path / "figures" / "main.png") as image:
        assert image.format == "PNG"


@pytest.mark.parametrize("text", ["", "{}\n", '{"split": "test"}\n',
                                  '{"split": "test", "temperature": 1, "name": "a", "seed": 0}\n'])
def test_measures_that_cannot_be_drawn_are_one_line(text, tmp_path, capsys):
    (tmp_path / "main.jsonl").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(tmp_path / "main.jsonl")])
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "main.png").exists()


def test_only_one_file_of_measures_is_drawn(tmp_path, capsys):
    write_lines(tmp_path / "main.jsonl", make_measures())
    with pytest.raises(SystemExit):
        plot.main([str(tmp_path / "main.jsonl")] * 2)
    assert "alone" in capsys.readouterr().err


def test_entropies_of_perfect_policies_by_hand(monkeypatch, tmp_path):
    """Two problems that both `++` solves and one of them also `+-`."""
    make_run(tmp_path / "sus-1", "sus", 1, eval_problems=2)
    (run,) = plot.find_runs([str(tmp_path)])
    asked = []
    problems = [SimpleNamespace(strategies=ways) for ways in ({"++"}, {"++", "+-"})]
    monkeypatch.setattr(plot.data, "load", lambda *arguments: asked.append(arguments) or problems)
    found = plot.perfect_entropies(run)
    assert asked == [("countdown", "test", 2)]
    assert found["one way"] == pytest.approx(0)
    three, one = 0.75, 0.25
    assert found["all ways"] == pytest.approx(-three * math.log(three) - one * math.log(one))
    run.config["data"] = "gsm8k"
    assert plot.perfect_entropies(run) == {}


def draw_points(points):
    """-> the line that draw_line draws through these points, and its band."""
    from matplotlib.figure import Figure
    axis = Figure().subplots()
    plot.draw_line(axis, "sus", points)
    (band,) = axis.collections[-1].get_paths()
    return axis.lines[0].get_xydata(), band.vertices


def test_a_line_goes_through_the_means_and_its_band_is_the_interval():
    points = [(0, 1.0), (10, 1.0), (10, 2.0), (0, 1.0), (10, 3.0)]
    line, band = draw_points(points)
    assert line.tolist() == [[0, 1.0], [10, 2.0]]
    at_ten = band[band[:, 0] == 10][:, 1]
    half = 4.303 / math.sqrt(3)
    assert at_ten.min() == pytest.approx(2 - half) and at_ten.max() == pytest.approx(2 + half)


def test_many_points_become_windows():
    line, _ = draw_points([(step, value) for step in range(1, 401) for value in (step, step + 2.0)])
    assert len(line) == 40
    assert line[0].tolist() == [10, 6.5]  # the mean of 1 to 10 is 5.5, one more in the middle
    assert line[-1].tolist() == [400, 396.5]


def test_more_settings_than_colours_can_be_told_apart(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig",
                        lambda figure, *arguments, **options: drawn.append(figure))
    points = [(f"setting {n}", x, n * x) for n in range(len(plot.PALETTE) + 4) for x in (1, 2)]
    plot.draw_figure({"y by x": points}, tmp_path / "many.png", {}, is_curve=True)
    styles = {(line.get_color(), line.get_linestyle()) for line in drawn[0].axes[0].lines}
    assert len(styles) == len(plot.PALETTE) + 4


def test_figures_show_what_the_files_hold(tmp_path, monkeypatch):
    for seed in (1, 2):
        make_run(tmp_path / f"sus-{seed}", "sus", seed, 0.1 * seed)
        make_run(tmp_path / f"grpo-{seed}", "grpo", seed)
        make_run(tmp_path / f"alpha=2-{seed}", "sus", seed, alpha=2.0)
    runs = plot.find_runs([str(tmp_path)])
    drawn = panels_of(monkeypatch, runs, tmp_path)
    assert ("sus", 20, 0.6) in drawn["story"]["pass@1 by step"]
    assert {name for name, *_ in drawn["intrinsic"]["ss by step"]} == {"sus", "alpha=2"}
    points = drawn["passes"]["pass@k by k"]
    assert {name for name, *_ in points} == {"sus", "grpo", "alpha=2", "base model"}
    assert [point for point in points if point[:2] == ("sus", 2)] == [
        ("sus", 2, pytest.approx(1.1)), ("sus", 2, pytest.approx(1.2))]
    base = [point for point in points if point[0] == "base model"]
    assert base == [("base model", k, shift) for shift in (0.1, 0.2) for k in (1, 2)]
    assert list(drawn["embeddings"]) == ["before training", "after sus", "after grpo",
                                         "after alpha=2"]
    assert drawn["embeddings"]["after sus"] == [("++", 1, 1.0), ("illegal", 1, 1.0)]


def test_a_whole_reproduction_shows_all_methods_sus_first(tmp_path, monkeypatch):
    for name in (*reproduce.MANY, "ss", "surprise"):
        make_run(tmp_path / f"{name}-1", name.partition("-")[0], 1, kl=len(name))
    drawn = panels_of(monkeypatch, plot.find_runs([str(tmp_path)]), tmp_path)
    shown = [name for name, *_ in drawn["story"]["pass@1 by step"]]
    assert set(shown) == {*reproduce.MANY, "ss", "surprise"} and shown[0] == "sus"


def test_other_settings_are_no_seeds(tmp_path):
    for folder, seed, kl in (("sus-countdown-1", 1, 0.0), ("sus-countdown-2", 2, 0.0),
                             ("sus-countdown-2-2", 2, 5.0)):
        make_run(tmp_path / folder, "sus", seed, kl=kl)
    make_run(tmp_path / "sus-countdown-1-2", "sus", 1, kl=0.0)  # the first one again: no new seed
    runs = plot.find_runs([str(tmp_path)])
    assert names_and_seeds(runs) == {"sus kl=0.0": [1, 2], "sus kl=5.0": [2]}


@pytest.mark.parametrize("finished", ["sus-countdown-1", "sus-countdown-1-2"])
def test_a_repeated_run_that_was_interrupted_does_not_replace_the_finished_one(tmp_path, finished):
    for name in ("sus-countdown-1", "sus-countdown-1-2"):
        make_run(tmp_path / name, "sus", 1, steps=20 if name == finished else 10)
    (run,) = plot.find_runs([str(tmp_path)])
    assert run.folder.name == finished and run.evaluations[-1]["step"] == 20


def test_the_same_seed_on_another_base_model_is_another_run(tmp_path):
    make_run(tmp_path / "a" / "sus-1", "sus", 1)
    make_run(tmp_path / "b" / "sus-1", "sus", 1, cache="/elsewhere")
    assert len(plot.find_runs([str(tmp_path)])) == 2


def test_no_runs_no_figures(tmp_path, capsys):
    make_run(tmp_path / "good" / "sus-1", "sus", 1)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(SystemExit) as stopped:
            plot.main([str(tmp_path / "good"), str(path)])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and str(path) in error and error.count("\n") == 1


def test_runs_are_not_counted_twice_mixed_or_misnamed(tmp_path):
    make_run(tmp_path / "sus-countdown-1", "sus", 1)
    runs = plot.find_runs([str(tmp_path), str(tmp_path / "sus-countdown-1")])
    assert len(runs) == 1 and runs[0].name == "sus"  # train.py's own name for a folder
    make_run(tmp_path / "grpo-1", "grpo", 1, eval_split="validation")
    with pytest.raises(ValueError, match="do not belong"):
        plot.find_runs([str(tmp_path)])


def test_missing_metrics_are_left_out(tmp_path, monkeypatch):
    for method in ("sus", "grpo", "ss"):
        make_run(tmp_path / f"{method}-1", method, 1)
        file = tmp_path / f"{method}-1" / "evaluations.jsonl"
        text = file.read_text().replace('"strategy_entropy": 1.0', '"strategy_entropy": null')
        file.write_text(text.replace('"cluster_entropy": 1.5', '"cluster_entropy": null'))
        (tmp_path / f"{method}-1" / "samples-before.jsonl").unlink()
    runs = plot.find_runs([str(tmp_path)])
    drawn = panels_of(monkeypatch, runs, tmp_path)
    assert list(drawn["diversity"]) == ["strategy_entropy by step"]
    assert [x for _, x, _ in drawn["diversity"]["strategy_entropy by step"]] == [0, 10] * 3
    assert list(drawn["embeddings"]) == ["after sus", "after grpo", "after ss"]


@pytest.mark.parametrize("name, damage", [
    ("samples.jsonl", '{"question": "q"}\n'), ("samples.jsonl", '{"question": "q", "resp\n'),
    ("evaluations.jsonl", "[]\n"), ("metrics.jsonl", '{"loss": 1}\n'), ("config.json", "{")])
def test_damage_is_named(tmp_path, capsys, name, damage):
    make_run(tmp_path / "sus-1", "sus", 1)
    (tmp_path / "sus-1" / name).write_text(damage)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(tmp_path)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and name in error and error.count("\n") == 1


def test_text_instead_of_a_number_is_left_out(tmp_path, monkeypatch):
    make_run(tmp_path / "sus-1", "sus", 1)
    file = tmp_path / "sus-1" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss": 0.1', '"loss": "much"'))
    runs = plot.find_runs([str(tmp_path)])
    assert "losses" not in panels_of(monkeypatch, runs, tmp_path)


def test_without_matplotlib_there_is_one_line(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "sus-1", "sus", 1)
    real_import = builtins.__import__

    def no_matplotlib(name, *arguments):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *arguments)
    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(SystemExit) as stopped:
        plot.main([str(tmp_path)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "pip install matplotlib" in error
    assert error.count("\n") == 1
