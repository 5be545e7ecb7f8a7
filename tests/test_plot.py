"""Figures from made-up runs: what is drawn, from which files, and what a folder without runs says."""
import json
import math

import pytest
from PIL import Image

import plot


def make_run(folder, method, seed, shift=0.0, **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"method": method, "seed": seed, "alpha": 4.0, "lambda_ss": 1.0, "lambda_sus": 0.5, "data": "countdown",
                                                   "eval_split": "test", **config}))
    rows = [{"step": s, "loss": 0.1, "correct": s / 40, "entropy": 0.5, **({"ss": 0.5, "sus": 0.2, "bonus_share": 0.1} if method != "grpo" else {})}
            for s in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [{"step": s, "pass@1": s / 40 + shift, "pass@5": s / 30 + shift, "strategy_entropy": 2 - s / 20, "cluster_entropy": None,
                    "pass_curve": [0.1 + shift, 0.2 + shift]} for s in (0, 10, 20)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    for name in ("samples-before", "samples"):
        record = {"question": "q", "responses": [{"text": "t", "correct": 1.0, "cluster": 0, "place": [seed, 1.0], "strategy": s} for s in ("++", None)]}
        (folder / f"{name}.jsonl").write_text(json.dumps(record) + "\n")


def test_runs_are_grouped_and_every_figure_is_drawn(tmp_path):
    for seed in (1, 2, 3):
        for method in ("sus", "grpo", "ss", "surprise"):
            make_run(tmp_path / f"{method}-{seed}", method, seed, 0.01 * seed)
        make_run(tmp_path / f"alpha=2-{seed}", "sus", seed, alpha=2.0)
    runs = plot.find_runs([str(tmp_path)])
    assert len(runs) == 15 and list(plot.grouped(runs))[:4] == ["sus", "grpo", "ss", "surprise"]
    files = plot.draw(runs, tmp_path / "figures")
    assert {file.stem for file in files} == {"story", "passes", "diversity", "ablation", "intrinsic", "losses", "sensitivity", "embeddings"}
    for file in files:
        with Image.open(file) as image:
            assert image.format == "PNG" and min(image.size) > 300 and len(image.convert("RGB").getcolors(10 ** 6)) > 20
    plot.main([str(tmp_path / "sus-1"), "--output", str(tmp_path / "one")])
    assert (tmp_path / "one" / "story.png").exists() and not (tmp_path / "one" / "ablation.png").exists()


def test_bands_by_hand():
    mean, half = plot.mean_and_half([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.303 / math.sqrt(3))
    assert plot.mean_and_half([5.0])[0] == 5.0 and math.isnan(plot.mean_and_half([5.0])[1])


def test_other_settings_are_no_seeds(tmp_path):
    for folder, seed, kl in (("sus-countdown-1", 1, 0.0), ("sus-countdown-2", 2, 0.0), ("sus-countdown-2-2", 2, 5.0)):
        make_run(tmp_path / folder, "sus", seed, kl=kl)
    make_run(tmp_path / "sus-countdown-1-2", "sus", 1, kl=0.0)             # the first one again is no further seed
    runs = plot.find_runs([str(tmp_path)])
    assert {name: [run.seed for run in group] for name, group in plot.grouped(runs).items()} == {"sus kl=0.0": [1, 2], "sus kl=5.0": [2]}
    assert len({plot.colour(name, list(plot.grouped(runs))) for name in plot.grouped(runs)}) == 2


def test_no_runs_no_figures(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SystemExit) as stopped:
            plot.main([str(path)])
        assert stopped.value.code == 2 and str(path) in capsys.readouterr().err


def test_runs_are_not_counted_twice_mixed_or_misnamed(tmp_path):
    make_run(tmp_path / "sus-countdown-1", "sus", 1)
    runs = plot.find_runs([str(tmp_path), str(tmp_path / "sus-countdown-1")])
    assert len(runs) == 1 and runs[0].name == "sus"                        # train.py's own name for a folder
    make_run(tmp_path / "grpo-1", "grpo", 1, eval_split="validation")
    with pytest.raises(ValueError, match="do not belong"):
        plot.find_runs([str(tmp_path)])


def test_missing_metrics_are_left_out_and_damage_is_named(tmp_path):
    for method in ("sus", "grpo", "ss"):
        make_run(tmp_path / f"{method}-1", method, 1)
        file = tmp_path / f"{method}-1" / "evaluations.jsonl"
        file.write_text(file.read_text().replace('"strategy_entropy": 1.0', '"strategy_entropy": null'))
    runs = plot.find_runs([str(tmp_path)])
    assert tmp_path / "ablation.png" in plot.draw(runs, tmp_path)
    (tmp_path / "sus-1" / "samples.jsonl").write_text('{"question": "q"}\n')
    with pytest.raises(ValueError, match="embeddings cannot be drawn"):
        plot.draw(runs, tmp_path)
