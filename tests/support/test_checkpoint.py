"""A run's folder: claimed once, locked, never written over; damage is one clear error."""
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import evaluate
import train
from support import checkpoint, files, tiny
from support.config import Config
from tests.conftest import adapted, small_model
from tests.test_train import (  # noqa: F401 (quick_world is a fixture)
    SMALL,
    adapter,
    all_files,
    assert_same_run,
    learned,
    metrics,
    quick_world,
    resume,
    run,
    same,
)

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache, quick_world) -> Path:  # noqa: F811
    """Four steps, with checkpoints of steps 2 and 4. No test may change this folder."""
    return run(tmp_path_factory.mktemp("runs") / "finished", cache, "--steps", "4",
               "--checkpoint-every", "2", "--alpha-decay", "0")


@pytest.fixture(scope="module")
def opened(finished, cache) -> train.Run:
    """A new run with the same settings, for checkpoints to be loaded into."""
    return train.Run(Config(**SMALL, run="unused", cache=str(cache), alpha_decay=0.0))


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def refused(capsys, main, *arguments) -> str:
    """The one line with which a command ends; warnings may come before it."""
    with pytest.raises(SystemExit) as caught:
        main(*arguments)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("warning: ")]
    assert caught.value.code == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


# New runs.


def test_a_run_is_never_written_over(finished, capsys):
    before = all_files(finished)
    error = refused(capsys, train.main, ["--run", str(finished)])
    assert "exists" in error
    assert "--resume" in error
    assert before == all_files(finished)


def test_a_file_or_a_strangers_folder_is_not_a_place_for_a_run(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "metrics.jsonl").write_text('{"step": 1}\n')
    before = all_files(tmp_path)
    for name in ("file", "folder"):
        assert "exists" in refused(capsys, train.main, ["--run", str(tmp_path / name)])
    assert before == all_files(tmp_path)


def test_an_empty_folder_is_as_good_as_none(cache, tmp_path):
    (tmp_path / "empty").mkdir()
    assert len(metrics(run(tmp_path / "empty", cache, "--steps", "1", "--method", "grpo"))) == 1


def test_without_a_name_every_run_gets_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "runs" / "sus-sums-0-2" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("not a run, and not to be touched")
    names = [checkpoint.claim(Config(data="sums.jsonl")).run for _ in range(3)]
    assert names == ["runs/sus-sums-0", "runs/sus-sums-0-3", "runs/sus-sums-0-4"]
    assert mine.read_text() == "not a run, and not to be touched"


def test_a_folders_name_says_method_data_and_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(method="experiments.rewards:rnd", data="/somewhere/sums.jsonl", seed=7)
    assert checkpoint.claim(config).run == "runs/rnd-sums-7"
    assert checkpoint.claim(Config(data="my_file:my_task")).run == "runs/sus-my_task-0"


def test_only_one_of_two_processes_gets_a_folder(tmp_path):
    """mkdir is the judge: nobody asks first whether the folder is there."""
    checkpoint.claim(Config(run=str(tmp_path / "run")))
    files.write_json(tmp_path / "run" / "config.json", {})
    with pytest.raises(ValueError, match="exists"):
        checkpoint.claim(Config(run=str(tmp_path / "run")))


def test_a_run_that_cannot_start_takes_back_only_what_it_made(cache, tmp_path, capsys):
    error = refused(capsys, run, tmp_path / "new", cache, "--max-new-tokens", "120")
    assert "context" in error
    assert not (tmp_path / "new").exists()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    refused(capsys, run, tmp_path / "link", cache, "--max-new-tokens", "120")
    assert list((tmp_path / "real").iterdir()) == []


def test_a_run_that_fails_after_its_first_evaluation_keeps_what_it_has(cache, tmp_path, monkeypatch,
                                                                       capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(train, "train_step", full)
        with pytest.raises(SystemExit) as caught:
            run(tmp_path / "run", cache, "--steps", "2")
    assert caught.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in error
    assert f"--run {tmp_path / 'run'} --resume" in error
    resume(tmp_path / "run")
    assert_same_run(run(tmp_path / "whole", cache, "--steps", "2"), tmp_path / "run")


@pytest.mark.parametrize("place", ["/proc/nowhere/run", "README.md/run", "x" * 300])
def test_places_that_cannot_be_written(place, cache, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    refused(capsys, run, place, cache, "--steps", "1")


def test_the_config_names_the_folders_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").touch()
    (tmp_path / "gsm8k").mkdir()
    config = Config(data="mine.jsonl", model="Qwen/Qwen2.5-1.5B")
    found = checkpoint.settle(config, set())
    assert found.data == str(tmp_path / "mine.jsonl")
    assert found.model == "Qwen/Qwen2.5-1.5B"
    assert found.encoder == ""
    assert checkpoint.claim(config).cache == str(tmp_path / "cache")


def test_a_task_is_known_by_its_name_even_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    assert checkpoint.settle(Config(data="gsm8k"), set()).data == "gsm8k"


# Who may use a folder.


def test_the_lock_harms_nothing_that_it_points_to(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        checkpoint.lock(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_folder_is_locked_while_its_run_is_open_and_free_afterwards(tmp_path):
    with checkpoint.run_folder(Config(run=str(tmp_path / "run")), set()) as config:
        assert json.loads((tmp_path / "run" / "config.json").read_text())["run"] == config.run
        with pytest.raises(ValueError, match="another process"):
            checkpoint.lock(tmp_path / "run")
        (tmp_path / "run" / "metrics.jsonl").touch()  # no longer untouched
    checkpoint.lock(tmp_path / "run").close()


def test_an_untouched_folder_goes_away_and_a_used_one_stays(tmp_path):
    with checkpoint.run_folder(Config(run=str(tmp_path / "run")), set()) as config:
        assert checkpoint.how_to_continue(config) == "Nothing was written."
    assert not (tmp_path / "run").exists()
    assert checkpoint.how_to_continue(config) == "The run's folder is gone."
    with pytest.raises(RuntimeError):
        with checkpoint.run_folder(Config(run=str(tmp_path / "a run")), set()) as config:
            (tmp_path / "a run" / "samples.md").touch()
            said = checkpoint.how_to_continue(config)
            raise RuntimeError
    assert said == f"To continue: python train.py --run '{tmp_path / 'a run'}' --resume"
    assert (tmp_path / "a run" / "config.json").exists()


# Resumed runs.


def test_resuming_with_other_settings_is_refused_by_name(finished, capsys):
    before = all_files(finished)
    error = refused(capsys, resume, finished, "--kl", "0.5", "--seed", "0", "--gate", "none")
    assert "--kl 0.5 (the run: 0.03)" in error
    assert "--gate none (the run: correct)" in error
    assert "--seed" not in error
    assert before == all_files(finished)


def test_a_resumed_run_may_change_what_alters_no_step(copy):
    resume(copy, "--steps", "5", "--micro-batch", "2", "--checkpoint-every", "1")
    saved = json.loads((copy / "config.json").read_text())
    assert (saved["steps"], saved["micro_batch"], saved["checkpoint_every"]) == (5, 2, 1)
    assert saved["resume"] is False
    assert [line["step"] for line in metrics(copy)] == [1, 2, 3, 4, 5]


def test_more_steps_are_refused_where_earlier_steps_depend_on_them(cache, tmp_path, capsys):
    folder = run(tmp_path / "run", cache, "--steps", "1", "--alpha-decay", "0.5")
    capsys.readouterr()
    error = refused(capsys, resume, folder, "--steps", "4")
    assert "--steps 4" in error
    assert "falls over --steps" in error
    resume(folder, "--steps", "1")  # the same number is no other setting


def test_plain_grpo_may_take_more_steps(cache, tmp_path):
    folder = run(tmp_path / "run", cache, "--steps", "1", "--method", "grpo")
    resume(folder, "--steps", "2")
    whole = run(tmp_path / "whole", cache, "--steps", "2", "--method", "grpo")
    assert same(learned(whole), learned(folder))
    assert metrics(whole) == metrics(folder)


def test_there_must_be_a_run_to_resume(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    for name in ("nothing", "model"):
        error = refused(capsys, resume, tmp_path / name)
        assert "--resume" in error
        assert str(tmp_path / name) in error
    assert "--resume" in refused(capsys, train.main, ["--resume"])
    assert not (tmp_path / "nothing").exists()


def test_a_run_is_resumed_from_anywhere_and_after_a_move(copy, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resume("copy", "--steps", "5")
    assert json.loads((copy / "config.json").read_text())["run"] == "copy"
    assert len(metrics(copy)) == 5


# Checkpoints.


def test_the_last_two_checkpoints_are_kept(opened, tmp_path):
    for step in (1, 2, 10, 1_000_000, 999_999):
        checkpoint.save(tmp_path, step, opened.learned(), opened.identity)
    assert list(checkpoint.find_checkpoints(tmp_path)) == [999_999, 1_000_000]


def test_files_of_other_names_are_no_checkpoints(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    for name in ("step-000002.safetensors", "step-x.safetensors", "step-3.safetensors.tmp",
                 "notes.txt", "step-.safetensors"):
        (tmp_path / "checkpoint" / name).touch()
    found = checkpoint.find_checkpoints(tmp_path)
    assert {step: file.name for step, file in found.items()} == {2: "step-000002.safetensors"}


def test_a_checkpoint_restores_everything(finished, opened, tmp_path):
    assert checkpoint.load(finished, opened.learned(), opened.identity) == 4
    checkpoint.save(tmp_path, 4, opened.learned(), opened.identity)
    name = "checkpoint/step-000004.safetensors"
    ours, theirs = load_file(tmp_path / name), load_file(finished / name)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert files.read_header(tmp_path / name) == files.read_header(finished / name)


@pytest.mark.parametrize("damage", ["cut", "empty", "of another step"])
def test_the_previous_checkpoint_is_used_when_the_last_is_damaged(damage, copy, finished, capsys):
    last = copy / "checkpoint" / "step-000004.safetensors"
    if damage == "cut":
        last.write_bytes(last.read_bytes()[:-100])
    elif damage == "empty":
        last.write_bytes(b"")
    else:
        shutil.copy(copy / "checkpoint" / "step-000002.safetensors", last)
    resume(copy)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning: " in line]
    assert len(warnings) == 1
    assert "step-000004.safetensors cannot be used" in warnings[0]
    assert_same_run(finished, copy)


def test_a_fallback_drops_what_came_later(copy, opened):
    (copy / "checkpoint" / "step-000004.safetensors").write_bytes(b"junk")
    (copy / "adapter" / "adapter_model.safetensors.12.tmp").write_bytes(b"half")
    assert checkpoint.load(copy, opened.learned(), opened.identity) == 2
    assert list(checkpoint.find_checkpoints(copy)) == [2]
    assert [line["step"] for line in metrics(copy)] == [1, 2]
    assert [line["step"] for line in files.read_lines(copy / "evaluations.jsonl")] == [0]
    assert not list(copy.rglob("*.tmp"))


def edit(change):
    """Rewrite all checkpoints of a run with something wrong inside."""
    def damage(folder):
        for file in (folder / "checkpoint").iterdir():
            tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
            header = files.read_header(file)
            change(tensors, header)
            save_file(tensors, file, header)
    return damage


def put(name, make):
    return edit(lambda tensors, header: tensors.update({name: make(tensors[name])}))


def fill(name, value):
    return edit(lambda tensors, header: tensors[name].view(-1)[0].fill_(value))


def write_junk(folder):
    for file in (folder / "checkpoint").iterdir():
        file.write_bytes(b"junk")


ADAPTER = "adapter.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
OPTIMIZER, NETWORKS = "optimizer._extra_state", "strategist._extra_state"
CHECKPOINTS = {
    "junk": write_junk,
    "a tensor of another shape": put("strategist.recent.response", lambda t: t[:3].clone()),
    "an adapter of another rank": put(ADAPTER, lambda t: t[:2].clone()),
    "an adapter of whole numbers": put(ADAPTER, lambda t: t.long()),
    "an adapter that is not finite": fill(ADAPTER, math.nan),
    "a network that is not finite": fill("strategist.E.0.weight", math.inf),
    "moments that are not finite": fill(OPTIMIZER, math.nan),
    "a step count below zero": fill(OPTIMIZER, -5.0),
    "an absurd step count": fill(OPTIMIZER, 1e30),
    "some moments missing": put(OPTIMIZER, lambda t: t[:7].clone()),
    "moments of whole numbers": put(OPTIMIZER, lambda t: t.long()),
    "some moments of the networks missing": put(NETWORKS, lambda t: t[:-1].clone()),
    "a tensor missing": edit(lambda tensors, header: tensors.pop("strategist.outcomes.query")),
    "no optimizer": edit(lambda tensors, header: tensors.pop(OPTIMIZER)),
    "a tensor too many": edit(lambda tensors, header: tensors.update(more=torch.zeros(1))),
    "a step below zero": edit(lambda tensors, header: header.update(step="-3")),
    "a step that is a word": edit(lambda tensors, header: header.update(step="four")),
    "no step": edit(lambda tensors, header: header.pop("step")),
    "no base model": edit(lambda tensors, header: header.pop("base")),
    "no settings": edit(lambda tensors, header: header.pop("settings")),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_touched(name, copy, opened, capsys):
    CHECKPOINTS[name](copy)
    before = all_files(copy)
    with pytest.raises(ValueError, match="no checkpoint .* can be used"):
        checkpoint.load(copy, opened.learned(), opened.identity)
    assert capsys.readouterr().err.count("warning: ") == 2
    assert before == all_files(copy)


def test_a_run_that_lost_its_checkpoints_says_that_it_starts_over(copy, opened, capsys):
    for file in (copy / "checkpoint").iterdir():
        file.unlink()
    assert checkpoint.load(copy, opened.learned(), opened.identity) == 0
    assert "has no checkpoint: its steps are taken again" in capsys.readouterr().err


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def rewrite(**changes):
    def damage(folder):
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(saved | changes))
    return damage


DAMAGES = [
    (CHECKPOINTS["junk"], "no checkpoint"), (CHECKPOINTS["a tensor missing"], "no checkpoint"),
    (write("config.json", "{"), "JSON"), (write("config.json", "{}"), "--resume"),
    (write("config.json", '{"method": "sus"}'), "version"),
    (rewrite(nonsense=1), "nonsense"), (rewrite(rank=4), "rank is 4, was 8"),
    (rewrite(method="grpo"), "method is grpo, was sus"), (rewrite(samples=8), "samples is 8"),
    (rewrite(reading="equations"), "reading is equations"), (rewrite(kl=5.0), "kl is 5.0"),
    (rewrite(seed=7), "seed is 7, was 0"), (rewrite(lambda_ss=2.0), "lambda_ss is 2.0, was 1.0"),
    (rewrite(steps="abc"), "steps"), (rewrite(learning_rate=None), "learning_rate"),
    (rewrite(samples=1), "samples"), (rewrite(seed="x"), "seed"), (rewrite(model=None), "model"),
    (rewrite(dtype="int8"), "dtype"), (rewrite(kl=float("nan")), "kl"),
    (rewrite(kl=10 ** 400), "kl"),
    (write("metrics.jsonl", "garbage}\n"), "metrics.jsonl"),
    (write("evaluations.jsonl", '{"a": 1}\n'), "evaluations.jsonl"),
    (write("clustering.safetensors", "junk"), "clustering.safetensors")]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_a_damaged_run_is_one_clear_error(number, copy, capsys):
    damage, word = DAMAGES[number]
    damage(copy)
    before = all_files(copy)
    assert word in refused(capsys, resume, copy)
    after = all_files(copy)
    # The run was copied: its config.json may learn the folder's new name, and nothing else.
    config = copy / "config.json"
    assert {**before, config: b""} == {**after, config: b""}
    if before[config] != after[config]:
        was, is_now = json.loads(before[config]), json.loads(after[config])
        assert {**was, "run": ""} == {**is_now, "run": ""}


def test_the_adapter_folder_is_made_new_when_the_run_goes_on(copy, finished):
    (copy / "adapter" / "adapter_model.safetensors").write_bytes(b"junk")
    (copy / "checkpoint" / "step-000004.safetensors").unlink()
    resume(copy)
    assert_same_run(finished, copy)


# What a run belongs to.


def test_a_run_does_not_go_on_with_other_problems(cache, tmp_path, capsys):
    """Its file was edited: a question, or an answer."""
    sums = [{"question": f"{a}+{b}=", "answer": a + b} for a in range(9) for b in range(9)]
    file = tmp_path / "sums.jsonl"

    def write_sums():
        file.write_text("".join(json.dumps(line) + "\n" for line in sums))
    write_sums()
    folder = run(tmp_path / "run", cache, "--steps", "1", "--method", "grpo", "--data", str(file),
                 "--model", str(tiny.base_folder("countdown", cache)), "--max-new-tokens", "4")
    capsys.readouterr()
    for line in sums:
        line["answer"] += 1
    write_sums()
    assert "other problems" in refused(capsys, resume, folder, "--steps", "2")
    for line in sums:
        line["answer"] -= 1
    write_sums()
    resume(folder, "--steps", "2")
    assert len(metrics(folder)) == 2


def test_what_may_change_is_no_part_of_a_runs_identity():
    own = Config(run="a", cache="a", method="grpo", model="here", data="here")
    moved = Config(run="b", cache="b", method="grpo", model="there", data="there", steps=9)
    first, second = (checkpoint.identify(each, small_model(), []) for each in (own, moved))
    assert first == second
    assert first != checkpoint.identify(Config(method="grpo", epochs=2), small_model(), [])
    falling = [checkpoint.identify(Config(steps=steps), small_model(), []) for steps in (5, 6)]
    assert falling[0]["settings"] != falling[1]["settings"]  # alpha falls over the steps
    falling = [Config(steps=steps, method="grpo", kl_decay=0.1) for steps in (5, 6)]
    falling = [checkpoint.identify(each, small_model(), []) for each in falling]
    assert falling[0]["settings"] != falling[1]["settings"]  # so does the KL weight


def test_a_run_does_not_forget_steps_that_it_has_taken(copy, capsys):
    assert "4 steps already" in refused(capsys, resume, copy, "--steps", "3")


def test_a_run_whose_base_model_is_gone_builds_no_other(copy, tmp_path, capsys):
    for main, flags in ((train.main, ["--run", str(copy), "--resume", "--steps", "5"]),
                        (evaluate.main, [str(copy)])):
        error = refused(capsys, main, [*flags, "--cache", str(tmp_path / "nothing")])
        assert "is gone" in error
        assert "--cache" in error
    assert not (tmp_path / "nothing").exists()


def test_the_newest_readable_checkpoint_says_how_far_a_run_has_come(copy, opened):
    assert checkpoint.find_step(copy, opened.identity) == 4
    (copy / "checkpoint" / "step-000004.safetensors").write_bytes(b"junk")
    assert checkpoint.find_step(copy, opened.identity) == 2
    shutil.rmtree(copy / "checkpoint")
    assert checkpoint.find_step(copy, opened.identity) == 0


def test_a_run_on_another_base_model_is_refused(finished):
    with pytest.raises(ValueError, match="other weights"):
        checkpoint.find_step(finished, {"base": checkpoint.fingerprint(small_model())})


def test_a_fingerprint_is_the_base_models():
    own = checkpoint.fingerprint(small_model())
    assert own == checkpoint.fingerprint(adapted())
    assert own == checkpoint.fingerprint(small_model().bfloat16())
    assert own != checkpoint.fingerprint(small_model(seed=1))


def test_every_weight_is_in_the_fingerprint():
    for name, _ in small_model().named_parameters():
        changed = small_model()
        changed.get_parameter(name).data.view(-1)[0] += 1
        assert checkpoint.fingerprint(changed) != checkpoint.fingerprint(small_model()), name


def test_a_config_is_a_runs_only_if_it_says_so(finished, cache):
    assert checkpoint.read_config(finished).steps == 4
    assert checkpoint.read_config(tiny.base_folder("countdown", cache)) is None
    assert checkpoint.read_config(cache) is None
    assert adapter(finished)
