"""Tables by hand on made-up runs, and real reproductions of the smallest size, also interrupted."""
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments import plot, reproduce
from support.config import Config, parse
from tests.experiments.test_plot import make_run

SMALL = "--eval-problems 8 --eval-samples 16 --problems 4 --samples 4 --strategy-warmup 4"
ROOT = Path(__file__).parents[2]


def planned(tmp_path, **changes):
    request = reproduce.Request(**changes)
    return reproduce.plan(request, tmp_path / request.part)


def config_of(flags):
    return parse(Config, "", flags)[0]


def row(table, name):
    """The cells of a row."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_tables_by_hand(tmp_path):
    for seed, gain in ((1, 0.1), (2, 0.2), (3, 0.3)):
        make_run(tmp_path / f"grpo-{seed}", "grpo", seed)  # pass@1 is 0.5 after the last step
        make_run(tmp_path / f"sus-{seed}", "sus", seed, gain)
    table = reproduce.make_table(plot.find_runs([str(tmp_path)]))
    assert table.startswith("|  | pass@1 | pass@5 | pass@16 | strategy entropy | cluster entropy |")
    assert row(table, "sus")[0] == "70.0% ± 24.8%"  # 4.303 * 0.1 / sqrt(3) = 0.248
    assert row(table, "sus")[3] == "1.00 ± 0.00"
    assert row(table, "grpo")[0] == "50.0% ± 0.0%"
    assert row(table, "sus over grpo")[0] == "+40% ± 50%"  # 0.2 / 0.5, 0.248 / 0.5
    assert row(table, "sus over grpo")[3] == "+0% ± 0%"
    make_run(tmp_path / "more" / "sus-9", "sus", 9, 0.9)  # has no partner, so it is in no pair
    table = reproduce.make_table(plot.find_runs([str(tmp_path)]))
    assert row(table, "sus over grpo")[0] == "+40% ± 50%"


def test_differences_are_paired_by_seed(tmp_path):
    for seed, level in ((1, 0.0), (2, 0.2), (3, 0.4)):  # seeds differ much, methods always by 0.1
        make_run(tmp_path / f"grpo-{seed}", "grpo", seed, level)
        make_run(tmp_path / f"sus-{seed}", "sus", seed, level + 0.1)
    table = reproduce.make_table(plot.find_runs([str(tmp_path)]))
    assert row(table, "sus over grpo")[0] == "+14% ± 0%"  # 0.1 / 0.7
    ours, theirs = ({seed: {"pass@1": level + seed} for seed in seeds}
                    for seeds, level in (((1, 2), 0.1), ((2, 1), 0.0)))  # in another order
    assert reproduce.cell("pass@1", ours, theirs) == "+7% ± 0%"  # 0.1 / 1.5


def test_base_models_count_once(tmp_path):
    """Runs on one base model have the same first evaluation: it is no sample of three."""
    for seed, shift in ((1, 0.1), (2, 0.3)):
        make_run(tmp_path / f"sus-{seed}", "sus", seed, shift)
        make_run(tmp_path / f"grpo-{seed}", "grpo", seed, shift)
    table = reproduce.make_table(plot.find_runs([str(tmp_path)]))
    assert row(table, "base model")[0] == "20.0% ± 127.1%"  # 12.706 * 0.1414 / sqrt(2)
    for seed in (1, 2, 3):
        make_run(tmp_path / "one" / f"sus-{seed}", "sus", seed, cache="/cache")
    table = reproduce.make_table(plot.find_runs([str(tmp_path / "one")]))
    assert row(table, "base model")[0] == "0.0%"


def test_one_seed_has_no_interval_and_a_division_by_zero_no_crash():
    line = {"pass@1": 0.5, "strategy_entropy": 1.0}
    assert reproduce.cell("pass@1", {1: line}) == "50.0%"
    assert reproduce.cell("strategy_entropy", {1: line, 2: line}) == "1.00 ± 0.00"
    nothing = {"pass@1": 0.0}
    assert reproduce.cell("pass@1", {1: line}, {1: nothing}) == "+nan%"


def test_a_missing_number_is_named(tmp_path):
    make_run(tmp_path / "sus-1", "sus", 1)
    file = tmp_path / "sus-1" / "evaluations.jsonl"
    file.write_text(file.read_text().replace('"cluster_entropy": 1.5', '"cluster_entropy": null'))
    with pytest.raises(ValueError, match="sus-1 lacks a number"):
        reproduce.make_table(plot.find_runs([str(tmp_path)]))


def test_a_finished_run_of_other_settings_is_refused(tmp_path):
    folder, flags = next(iter(planned(tmp_path, steps=3).items()))
    assert not reproduce.is_finished(folder, flags)
    folder.mkdir(parents=True)
    config = config_of(flags)
    (folder / "config.json").write_text(json.dumps(asdict(replace(config, run="x", device="cpu"))))
    (folder / "evaluations.jsonl").write_text('{"step": 2}\n')
    assert not reproduce.is_finished(folder, flags)  # the last evaluation is missing
    (folder / "evaluations.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    assert reproduce.is_finished(folder, flags)
    for name, value in (("steps", "5"), ("alpha", "99"), ("cache", "cache-1"), ("method", "ss")):
        with pytest.raises(ValueError, match=f"{folder.name} has other settings .{name}."):
            reproduce.is_finished(folder, [*flags, f"--{name}", value])


def test_quick_is_a_part_of_its_own(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(["--quick", "--part", "sweep", "--folder", str(tmp_path)])
    assert stopped.value.code == 2 and "--part sweep" in capsys.readouterr().err


def test_a_plan_tunes_on_other_problems_and_seeds_than_it_reports(tmp_path):
    parts = {part: planned(tmp_path, part=part) for part in reproduce.PARTS}
    configs = {part: [config_of(flags) for flags in jobs.values()] for part, jobs in parts.items()}
    seeds = {part: {config.seed for config in found} for part, found in configs.items()}
    for part in ("sweep", "tune"):
        assert seeds[part] == {0, 1, 2, 3, 4}
        assert {config.eval_split for config in configs[part]} == {"validation"}
    for part in ("main", "quick", "others"):
        assert seeds[part] == {10, 11, 12, 13, 14}
        assert {config.eval_split for config in configs[part]} == {"test"}
    assert len(configs["tune"]) == len(configs["sweep"])  # the same budget for both methods
    assert {config.method for config in configs["tune"]} == {"grpo"}
    for found in configs.values():
        assert len(set(map(str, found))) == len(found)  # no setting twice
    folders = [folder for jobs in parts.values() for folder in jobs]
    assert len(set(folders)) == len(folders)
    assert list(reproduce.QUICK) == ["sus", "grpo", "grpo-no-kl"]


def test_each_seed_has_a_base_model_of_its_own(tmp_path):
    def bases(**changes):
        configs = [config_of(flags) for flags in planned(tmp_path, **changes).values()]
        return {(config.seed, Path(config.cache).name) for config in configs}
    assert bases() == {(10, "cache"), *((10 + n, f"cache-{n}") for n in range(1, 5))}
    assert bases(part="tune", seeds=2, cache="/c/x") == {(0, "x"), (1, "x-1")}
    assert bases(bases=1, seeds=3) == {(10, "cache"), (11, "cache"), (12, "cache")}
    assert bases(bases=2, seeds=3) == {(10, "cache"), (11, "cache-1"), (12, "cache")}


def test_the_plotted_names_are_those_of_the_settings(tmp_path):
    for part, settings in reproduce.PARTS.items():
        for folder, flags in planned(tmp_path, part=part, seeds=2).items():
            make_run(folder, **{"method": "", "seed": 0} | asdict(config_of(flags)))
        runs = plot.find_runs([str(tmp_path / part)])
        assert {run.name for run in runs} == settings.keys(), part


def test_quick_changes_what_was_not_given(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce.tiny, "find_tiny", lambda *arguments, **options: None)
    monkeypatch.setattr(reproduce, "run_all", lambda jobs, workers: planned_jobs.update(jobs))
    planned_jobs = {}
    with pytest.raises(SystemExit):  # there are no runs to read
        reproduce.main(["--quick", "--seeds", "2", "--folder", str(tmp_path)])
    configs = [config_of(flags) for flags in planned_jobs.values()]
    assert {folder.name for folder in planned_jobs} == {
        f"{name}-{seed}" for name in ("sus", "grpo", "grpo-no-kl") for seed in (10, 11)}
    assert {config.steps for config in configs} == {160}
    assert {config.eval_every for config in configs} == {40}
    assert {Path(config.cache).name for config in configs} == {"cache"}


def test_base_models_are_built_with_their_own_seeds(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(reproduce.tiny, "find_tiny",
                        lambda task, cache, seed: built.append((task, cache, seed)))
    monkeypatch.setattr(reproduce, "run_all", lambda jobs, workers: None)
    with pytest.raises(SystemExit):  # there are no runs to read
        reproduce.main(["--seeds", "3", "--bases", "2", "--folder", str(tmp_path),
                        "--cache", str(tmp_path / "base")])
    assert built == [("countdown", tmp_path / "base", 0), ("countdown", tmp_path / "base-1", 1)]


def test_a_small_reproduction_goes_on_after_a_failure(cache, tmp_path, monkeypatch, capsys):
    settings = {"grpo": f"grpo {SMALL}", "sus": f"sus {SMALL} --encoder {tmp_path / 'nowhere'}"}
    monkeypatch.setitem(reproduce.PARTS, "main", settings)
    command = ["--steps", "4", "--seeds", "1", "--folder", str(tmp_path), "--cache", str(cache),
               "--bases", "1"]
    with pytest.raises(SystemExit) as stopped:
        reproduce.main([*command, "--workers", "1"])  # the first run ends, the second one fails
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    assert "sus-10 failed: error:" in error and "nowhere" in error and "sus-10.log" in error
    settings["sus"] = f"sus {SMALL}"
    first = tmp_path / "main" / "grpo-10" / "metrics.jsonl"
    before = first.stat().st_mtime_ns
    reproduce.main([*command, "--workers", "2"])
    assert first.stat().st_mtime_ns == before  # what was finished did not run again
    table = (tmp_path / "main" / "tables.md").read_text()
    assert "| sus over grpo |" in table and table.startswith("4 steps: mean ± half of its 95 %")
    output = capsys.readouterr().out
    assert table in output and "story.png" in output
    assert (tmp_path / "main" / "story.png").exists()
    assert not list((tmp_path / "main").glob("*.log"))

    def times():
        files = (tmp_path / "main").rglob("metrics.jsonl")
        return {file: file.stat().st_mtime_ns for file in files}
    kept = times()
    assert len(kept) == 2
    reproduce.main([*command, "--workers", "2"])  # everything is there: nothing runs again
    assert kept == times()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_reproduction_saves_its_runs(cache, tmp_path, number):
    arguments = ["--quick", "--steps", "2000", "--seeds", "1", "--workers", "1", "--folder",
                 str(tmp_path), "--cache", str(cache)]
    script = ("from experiments import reproduce\n"
              f"reproduce.PARTS['quick'] = {{'sus': 'sus {SMALL}'}}\n"
              f"reproduce.main({arguments})")
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE,
                               text=True)
    metrics = tmp_path / "quick" / "sus-10" / "metrics.jsonl"
    deadline = time.time() + 300
    while not metrics.exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130 and "The same command goes on" in error
    steps = len(metrics.read_text().splitlines())
    checkpoints = sorted((metrics.parent / "checkpoint").iterdir())
    assert checkpoints[-1].name == f"step-{steps:06d}.safetensors"  # saved, and no longer running


@pytest.mark.parametrize("workers", [1, 2])
def test_so_many_runs_at_a_time_with_one_thread_each(tmp_path, monkeypatch, workers):
    """Two runs with two threads each on two cores would wait for each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(reproduce.tiny, "find_tiny", lambda *arguments, **options: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    started, ended = [], []

    class Process:
        returncode = 0

        def __init__(self, command, **options):
            assert os.environ["OMP_NUM_THREADS"] == "1" and options["start_new_session"]
            started.append(command)
            self.polls = 0

        def poll(self):
            self.polls += 1
            running.append(len(started) - len(ended))
            if self.polls < 3:
                return None
            ended.append(self)
            return 0
    running = []
    monkeypatch.setattr(subprocess, "Popen", Process)
    with pytest.raises(SystemExit):  # there are no runs to read
        reproduce.main(["--quick", "--folder", str(tmp_path), "--workers", str(workers)])
    assert len(started) == len(ended) == 9 and max(running) == workers
    assert all(command[1] == ROOT / "train.py" for command in started)


def test_only_a_run_that_was_begun_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: command)
    folder = tmp_path / "sus-10"
    assert reproduce.start(folder, ["--seed", "10"])[2:] == ["--run", folder, "--seed", "10"]
    folder.mkdir()
    assert "--resume" not in reproduce.start(folder, [])  # an empty folder holds no run
    (folder / "config.json").write_text("{}")
    assert "--resume" in reproduce.start(folder, [])


def test_a_failed_run_is_reported_with_its_last_line(tmp_path, monkeypatch):
    class Process:
        returncode = 2

        def __init__(self, command, stdout, **options):
            stdout.write("training sus: 3 of 400\nnote: all is well\nerror: the disk is full\n")

        def poll(self):
            return 2
    monkeypatch.setattr(subprocess, "Popen", Process)
    jobs = {tmp_path / "sus-10": ["--seed", "10"], tmp_path / "sus-11": ["--seed", "11"]}
    with pytest.raises(ValueError, match="sus-10 failed: error: the disk is full .*sus-10.log"):
        reproduce.run_all(jobs, workers=1)
    assert [file.name for file in tmp_path.iterdir()] == ["sus-10.log"]  # kept; no further start


def test_a_bad_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(["--folder", str(tmp_path / "file")])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "file" in error and error.count("\n") == 1
