"""The statistics by hand on made-up runs, and a real, interrupted and resumed reproduction of the smallest size."""
import json
from dataclasses import asdict

import pytest
from test_plot import make_run

import flags
import knobs
import plot
import reproduce


def test_tables_by_hand(tmp_path):
    for seed, gain in ((1, 0.1), (2, 0.2), (3, 0.3)):
        make_run(tmp_path / f"grpo-{seed}", "grpo", seed)                  # pass@1 is 0.5 after the last step
        make_run(tmp_path / f"sus-{seed}", "sus", seed, gain)
    runs = plot.find_runs([str(tmp_path)])
    assert reproduce.values(runs, "sus", "pass@1") == pytest.approx({1: 0.6, 2: 0.7, 3: 0.8})
    metrics = {"pass@1": "pass@1", "strategy_entropy": "entropy"}
    table = "\n".join(reproduce.results_table(runs, ["sus", "grpo"], metrics))
    assert "| base model | 20.0 ± 24.8 % | 2.00 |" in table              # these seeds have base models of their own
    assert "| sus | 70.0 ± 24.8 % | 1.00 ± 0.00 |" in table            # 4.303 * 0.1 / sqrt(3) = 0.248
    make_run(tmp_path / "more" / "sus-9", "sus", 9, 0.9)                   # no partner: it must not be paired with another's
    runs = plot.find_runs([str(tmp_path)])
    assert "| sus over grpo | +40 % (-10 to +90) | +0 % (+0 to +0) |" in reproduce.difference_table(runs, [("sus", "grpo")], metrics)


def test_one_seed_has_no_interval():
    assert reproduce.shown([0.5], "pass@1") == "50.0 %" and reproduce.shown([1.0, 1.0], "strategy_entropy") == "1.00 ± 0.00"


def test_a_finished_run_of_other_settings_is_refused(tmp_path):
    job = reproduce.plan(reproduce.Config(folder=str(tmp_path), steps=3))[0]
    assert not job.finished()
    job.folder.mkdir(parents=True)
    (job.folder / "config.json").write_text(json.dumps(asdict(reproduce.knobs.Config(seed=10, steps=3))))
    (job.folder / "evaluations.jsonl").write_text('{"step": 2}\n')
    assert not job.finished()                                              # the last evaluation got lost: it will be taken again
    (job.folder / "evaluations.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    assert job.finished()
    job.flags += ["--steps", "5"]
    with pytest.raises(ValueError, match="other settings .steps."):
        job.finished()
    job.flags += ["--steps", "3", "--alpha", "99"]
    with pytest.raises(ValueError, match="other settings .alpha."):
        job.finished()
    job.flags[-1:] = [str(knobs.Config().alpha), "--cache", "cache-1"]
    with pytest.raises(ValueError, match="other settings .cache."):
        job.finished()


def test_the_quick_form_is_of_the_main_part(capsys):
    with pytest.raises(SystemExit):
        reproduce.main(["--quick", "--part", "sweep"])
    assert "--part sweep" in capsys.readouterr().err


def test_a_plan_tunes_on_other_problems_and_seeds_than_it_reports():
    config = reproduce.Config()
    tune, sweep, main = (reproduce.plan(reproduce.Config(part=part)) for part in ("tune", "sweep", "main"))
    assert len(tune) == len(sweep) and {job.seed for job in tune} == {job.seed for job in sweep}      # the same budget for both
    for part in (tune, sweep, main):
        assert len({str(flags.parse(knobs.Config, "", job.flags)[0]) for job in part}) == len(part)      # no setting twice
    tune += sweep
    assert {job.seed for job in tune}.isdisjoint(job.seed for job in main)
    assert all("validation" in job.flags for job in tune) and all("test" in job.flags for job in main)
    assert len(main) == config.seeds * len(reproduce.MAIN) and len({job.folder for job in tune + main}) == len(tune + main)
    assert {(job.seed, job.flags[-1]) for job in main} == {(10, "cache"), *((10 + n, f"cache-{n}") for n in range(1, 5))}
    assert [reproduce.base_of(config, seed)[1] for seed in (10, 11, 12, 0, 1, 2)] == [0, 1, 2, 0, 1, 2]
    assert all(job.flags[-1] == "cache" for job in reproduce.plan(reproduce.Config(bases=1)))
    quick = reproduce.plan(reproduce.Config(quick=True, **reproduce.QUICK_FORM))
    assert {job.seed for job in quick} == {10, 11, 12} and {job.folder for job in quick}.isdisjoint(job.folder for job in main)


def test_a_small_reproduction_goes_on_after_a_failure(cache, tmp_path, monkeypatch, capsys):
    small = "--eval-problems 8 --eval-samples 16 --problems 4 --samples 4 --train-problems 20"
    monkeypatch.setitem(reproduce.PARTS, "main", {"grpo": f"--method grpo {small}", "sus": f"--strategy-warmup 4 --layer 99 {small}"})
    command = ["--steps", "4", "--seeds", "2", "--folder", str(tmp_path), "--cache", str(cache), "--bases", "1"]
    with pytest.raises(SystemExit) as stopped:
        reproduce.main([*command, "--workers", "1"])                       # one after the other: the first is finished, the second fails
    assert stopped.value.code == 2 and "--layer 99" in capsys.readouterr().err
    reproduce.PARTS["main"]["sus"] = f"--strategy-warmup 4 {small}"
    first = tmp_path / "main" / "grpo-10" / "metrics.jsonl"
    before = first.stat().st_mtime_ns
    reproduce.main([*command, "--workers", "2"])
    assert first.stat().st_mtime_ns == before                              # what was finished did not run again
    text = (tmp_path / "main" / "tables.md").read_text()
    assert "| sus over grpo |" in text and "seeds 10, 11" in text and text in capsys.readouterr().out
    assert (tmp_path / "main" / "story.png").exists()
    assert not list((tmp_path / "main").glob("*.log"))
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "main").rglob("metrics.jsonl")}
    reproduce.main([*command, "--workers", "2"])                           # everything is there: nothing runs again
    assert kept == {file: file.stat().st_mtime_ns for file in (tmp_path / "main").rglob("metrics.jsonl")}
