"""What is planned, and real reproductions of the smallest size, also interrupted."""
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments import plot, reproduce
from support.config import Config, parse
from support.files import read_lines
from tests.experiments.test_plot import make_run

SMALL = "--eval-problems 8 --eval-samples 16 --problems 4 --samples 4 --strategy-warmup 4"
ROOT = Path(__file__).parents[2]


def planned(tmp_path, **changes):
    request = reproduce.Request(**changes)
    return reproduce.plan(request, tmp_path / request.part)


def config_of(flags):
    return parse(Config, "", flags)[0]


def test_a_finished_run_of_other_settings_is_refused(tmp_path):
    folder, flags = next(iter(planned(tmp_path, steps=3).items()))
    assert not reproduce.is_trained(folder, flags)
    folder.mkdir(parents=True)
    config = config_of(flags)
    (folder / "config.json").write_text(json.dumps(asdict(replace(config, run="x", device="cpu"))))
    (folder / "evaluations.jsonl").write_text('{"step": 2}\n')
    assert not reproduce.is_trained(folder, flags)  # the last evaluation is missing
    (folder / "evaluations.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    assert reproduce.is_trained(folder, flags)
    for name, value in (("steps", "5"), ("alpha", "99"), ("cache", "cache-1"), ("method", "ss")):
        with pytest.raises(ValueError, match=f"{folder.name} has other settings .{name}."):
            reproduce.is_trained(folder, [*flags, f"--{name}", value])


def test_a_run_keeps_the_absolute_path_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text("")
    flags = ["--data", "few.jsonl", "--steps", "3"]
    (tmp_path / "sus-1").mkdir()
    config = replace(config_of(flags), data=str(tmp_path / "few.jsonl"))
    (tmp_path / "sus-1/config.json").write_text(json.dumps(asdict(config)))
    (tmp_path / "sus-1/evaluations.jsonl").write_text('{"step": 3}\n')
    assert reproduce.is_trained(tmp_path / "sus-1", flags)


def test_quick_is_a_part_of_its_own(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(["--quick", "--part", "few-tune", "--folder", str(tmp_path)])
    assert stopped.value.code == 2 and "--part few-tune" in capsys.readouterr().err


# The first seed and the first base model of each part.
TUNING = {"calculations-tune": (0, 0), "few-tune": (0, 0), "many-tune": (0, 0),
          "many-sus-tune": (30, 10)}
REPORTS = {"calculations": (60, 5), "few": (50, 20), "few-again": (55, 25), "four": (70, 0),
           "others": (40, 15), "sweep": (40, 15), "many": (40, 15), "long": (40, 15)}


def test_a_plan_tunes_on_other_problems_seeds_and_base_models_than_it_reports(tmp_path):
    parts = {part: planned(tmp_path, part=part) for part in reproduce.PARTS}
    configs = {part: [config_of(flags) for flags in jobs.values()] for part, jobs in parts.items()}
    for part, found in configs.items():
        pairs = {(config.seed, Path(config.cache).name) for config in found}
        if part in TUNING:
            seed, base = TUNING[part]
            assert pairs == {(seed + n, f"cache-{base + n}".removesuffix("-0")) for n in range(5)}
            assert {config.eval_split for config in found} == {"validation"}
            assert reproduce.PARTS[part].splits == ("validation",)
        elif part in REPORTS:
            seed, base = REPORTS[part]
            assert pairs == {(seed + n, f"cache-{base + n}".removesuffix("-0")) for n in range(5)}
            assert {config.eval_split for config in found} == {"test"}
        else:
            first = {"quick": 10, "text": 80}[part]
            assert pairs == {(first + n, "cache") for n in range(5)}
        assert len(set(map(str, found))) == len(found)  # no setting twice
    folders = [folder for jobs in parts.values() for folder in jobs]
    assert len(set(folders)) == len(folders)
    assert list(reproduce.QUICK) == ["sus", "grpo", "shuffled"]


@pytest.mark.parametrize("part", ["calculations-tune", "few-tune", "many-tune"])
def test_every_rival_is_tuned_alike(part):
    methods = [setting.split()[0] for setting in reproduce.PARTS[part].settings.values()]
    assert "grpo" in methods
    assert set(Counter(methods).values()) == {len(methods) // len(set(methods))}


def test_the_plotted_names_are_those_of_the_settings(tmp_path):
    for part, settings in reproduce.PARTS.items():
        for folder, flags in planned(tmp_path, part=part, seeds=2).items():
            make_run(folder, **{"method": "", "seed": 0} | asdict(config_of(flags)))
        runs = plot.find_runs([str(tmp_path / part)])
        assert {run.name for run in runs} == settings.settings.keys(), part


def test_quick_changes_what_was_not_given(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce.tiny, "find_tiny", lambda *arguments, **options: None)
    monkeypatch.setattr(reproduce, "run_all", lambda jobs, part, workers: planned_jobs.update(jobs))
    planned_jobs = {}
    monkeypatch.setattr(reproduce.temperatures, "read_measures", lambda folders, splits, at: [])
    with pytest.raises(SystemExit):  # there is nothing to compare
        reproduce.main(["--quick", "--seeds", "2", "--folder", str(tmp_path)])
    configs = [config_of(flags) for flags in planned_jobs.values()]
    assert {folder.name for folder in planned_jobs} == {
        f"{name}-{seed}" for name in ("sus", "grpo", "shuffled") for seed in (10, 11)}
    assert {config.steps for config in configs} == {160}
    assert {config.eval_every for config in configs} == {40}
    assert {Path(config.cache).name for config in configs} == {"cache"}


def test_base_models_are_built_with_their_own_seeds(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(reproduce.tiny, "find_tiny",
                        lambda task, cache, seed: built.append((task, cache, seed)))
    monkeypatch.setattr(reproduce, "run_all", lambda jobs, part, workers: None)
    monkeypatch.setattr(reproduce.temperatures, "read_measures", lambda folders, splits, at: [])
    with pytest.raises(SystemExit):  # there is nothing to compare
        reproduce.main(["--part", "many", "--seeds", "2", "--folder", str(tmp_path),
                        "--cache", str(tmp_path / "base")])
    assert built == [("countdown-many", tmp_path / "base-15", 15),
                     ("countdown-many", tmp_path / "base-16", 16)]


def test_a_small_reproduction_goes_on_after_a_failure(cache, tmp_path, monkeypatch, capsys):
    settings = {"grpo": f"grpo {SMALL}", "sus": f"sus {SMALL} --encoder {tmp_path / 'nowhere'}"}
    part = replace(reproduce.PARTS["quick"], settings=settings, problems=4)
    monkeypatch.setitem(reproduce.PARTS, "quick", part)
    command = ["--quick", "--steps", "4", "--seeds", "1", "--folder", str(tmp_path), "--cache",
               str(cache)]
    with pytest.raises(SystemExit) as stopped:
        reproduce.main([*command, "--workers", "1"])  # the first run ends, the second one fails
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    assert "sus-10 failed: error:" in error and "nowhere" in error and "sus-10.log" in error
    settings["sus"] = f"sus {SMALL}"
    output = tmp_path / "quick"
    first = output / "grpo-10" / "metrics.jsonl"
    before = first.stat().st_mtime_ns
    reproduce.main([*command, "--workers", "2"])
    assert first.stat().st_mtime_ns == before  # what was finished did not run again
    table = (output / "tables.md").read_text()
    assert "| sus |" in table and table.startswith("4 steps, test problems, seeds: 1")
    printed = capsys.readouterr().out
    assert table in printed and "story.png" in printed
    assert (output / "story.png").exists() and (output / "temperatures.png").exists()
    assert not list(output.glob("*.log"))
    lines = read_lines(output / "measures.jsonl", key="split")
    assert {(line["name"], line["split"]) for line in lines} == {
        (name, split) for name in ("grpo", "sus", "base model") for split in ("validation", "test")}
    assert {line["problems"] for line in lines} == {4}

    def times():
        return {file: file.stat().st_mtime_ns for file in output.rglob("*s.jsonl")
                if file.name != "measures.jsonl"}
    kept = times()
    assert len(kept) >= 6
    reproduce.main([*command, "--workers", "2"])  # everything is there: nothing runs again
    assert kept == times()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_reproduction_saves_its_runs(cache, tmp_path, number):
    arguments = ["--quick", "--steps", "2000", "--seeds", "1", "--workers", "1", "--folder",
                 str(tmp_path), "--cache", str(cache)]
    script = ("from dataclasses import replace\nfrom experiments import reproduce\n"
              "part = reproduce.PARTS['quick']\n"
              f"reproduce.PARTS['quick'] = replace(part, settings={{'sus': 'sus {SMALL}'}})\n"
              f"reproduce.main({arguments})")
    process = subprocess.Popen(  # a background job may have been told to ignore SIGINT
        [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
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
    monkeypatch.setattr(reproduce, "next_command", lambda folder, flags, part: (
        None if [sys.executable, folder] in started else [folder]))
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
    monkeypatch.setattr(reproduce.temperatures, "read_measures", lambda folders, splits, at: [])
    with pytest.raises(SystemExit):  # there is nothing to compare
        reproduce.main(["--quick", "--folder", str(tmp_path), "--workers", str(workers)])
    assert len(started) == len(ended) == 6 and max(running) == workers


def test_a_run_is_trained_then_measured_and_the_first_setting_with_its_base_model(tmp_path):
    part = reproduce.PARTS["quick"]
    jobs = planned(tmp_path, part="quick", steps=3)
    for name in ("sus", "grpo"):
        folder = tmp_path / "quick" / f"{name}-10"
        command = reproduce.next_command(folder, jobs[folder], part)
        assert command[:3] == [ROOT / "train.py", "--run", folder] and "--resume" not in command
        folder.mkdir(parents=True)
        assert "--resume" not in reproduce.next_command(folder, jobs[folder], part)  # it is empty
        config = replace(config_of(jobs[folder]), run="x", device="cpu")
        (folder / "config.json").write_text(json.dumps(asdict(config)))
        assert reproduce.next_command(folder, jobs[folder], part)[-1] == "--resume"
        (folder / "evaluations.jsonl").write_text('{"step": 3}\n')
        command = reproduce.next_command(folder, jobs[folder], part)
        assert command[:5] == ["-m", "experiments.temperatures", folder, "--splits", "validation"]
        lines = "".join(json.dumps({"split": split, "temperature": t, "asked": part.problems,
                                    "step": 0}) + "\n" for split in part.splits
                        for t in reproduce.temperatures.TEMPERATURES)
        (folder / "temperatures.jsonl").write_text(lines.splitlines()[0] + "\n")
        assert reproduce.next_command(folder, jobs[folder], part) == command  # a split is missing
        (folder / "temperatures.jsonl").write_text(lines)
        if name == "sus":
            assert reproduce.next_command(folder, jobs[folder], part) == [*command, "--base"]
            (folder / "base.jsonl").write_text(lines)
        assert reproduce.next_command(folder, jobs[folder], part) is None


def test_a_process_that_leaves_no_results_is_not_started_for_ever(tmp_path, monkeypatch):
    class Process:
        returncode = 0

        def __init__(self, command, **options):
            pass

        def poll(self):
            return 0
    monkeypatch.setattr(subprocess, "Popen", Process)
    with pytest.raises(ValueError, match="sus-10 ended without its results"):
        reproduce.run_all({tmp_path / "sus-10": []}, reproduce.PARTS["quick"], workers=1)


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
        reproduce.run_all(jobs, reproduce.PARTS["quick"], workers=1)
    assert [file.name for file in tmp_path.iterdir()] == ["sus-10.log"]  # kept; no further start


def test_a_bad_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        reproduce.main(["--folder", str(tmp_path / "file")])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "file" in error and error.count("\n") == 1
