"""The loop: a real run, resumed runs that end on the same bits, Ctrl-C, and every kind of bad input."""
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from conftest import make_sentence_encoder
from peft import PeftModel
from safetensors.torch import load_file, save_file

import checkpoint
import data
import evaluate
import train

ROOT = Path(__file__).parent.parent
QUICK = ["--problems", "6", "--samples", "4", "--eval-problems", "8", "--eval-samples", "5", "--train-problems", "40",
         "--device", "cpu", "--strategy-warmup", "8", "--alpha-decay", "0", "--recent", "20", "--buffer", "30", "--strategy-batch", "4"]
WEIGHTS = ["--learn-lambdas", "--lambda-every", "3", "--scale-intrinsic"]
TIMES = ("tokens_per_second", "seconds_")


def run(folder, cache, *flags):
    train.main(["--run", str(folder), "--cache", str(cache), *QUICK, *flags])
    return Path(folder)


def adapter(folder):
    return load_file(Path(folder) / "adapter" / "adapter_model.safetensors")


def metrics(folder, timed=False):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if timed or not k.startswith(TIMES)} for line in lines]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """Eight steps without interruption, with everything that a checkpoint must carry switched on."""
    return run(tmp_path_factory.mktemp("runs") / "whole", cache, "--steps", "8", "--checkpoint-every", "3", "--kl", "0.01",
               "--eval-every", "4", *WEIGHTS)


def test_a_run_folder_holds_what_the_readme_promises(whole, cache):
    config, evaluation = (json.loads((whole / name).read_text()) for name in ("config.json", "evaluation.json"))
    assert config["steps"] == 8 and config["problems"] == 6 and config["model"] == "tiny"
    for name in ("pass@1", "pass@5", "strategy_entropy", "valid", "distinct"):
        low, high = evaluation["intervals"][name]
        assert isinstance(evaluation[name], float) and low <= high
    lines = metrics(whole, timed=True)
    assert [line["step"] for line in lines] == list(range(1, 9))
    for name in ("loss", "reward", "correct", "kl", "entropy", "clip_share", "zero_signal", "response_length", "truncated",
                 "gradient_norm", "learning_rate", "tokens_per_second", "seconds_rollout", "seconds_score",
                 "seconds_intrinsic", "seconds_advantage", "seconds_update", "ss", "sus", "lambda_ss", "lambda_sus", "alpha", "bonus",
                 "bonus_share", "brier", "contrastive_loss", "contrastive_accuracy", "success_loss", "world_loss"):
        assert all(isinstance(line[name], (int, float)) for line in lines), name
    assert lines[-1]["kl"] > 0 and lines[0]["kl"] == 0
    steps = [json.loads(line)["step"] for line in (whole / "evaluations.jsonl").read_text().splitlines()]
    assert steps == [0, 4, 8]
    assert not list(whole.rglob("*.tmp")) and len(list((whole / "checkpoint").iterdir())) == 2
    theirs = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(cache / "tiny-countdown"), whole / "adapter")
    ours = train.lora.load(evaluate.Transformer.from_pretrained(cache / "tiny-countdown"), whole / "adapter")
    ids = torch.arange(20).view(2, 10)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_the_same_seed_gives_the_same_run_and_another_does_not(whole, cache, tmp_path):
    flags = ["--steps", "8", "--checkpoint-every", "3", "--kl", "0.01", "--eval-every", "4", *WEIGHTS]
    assert same(adapter(whole), adapter(run(tmp_path / "again", cache, *flags)))
    assert metrics(whole) == metrics(tmp_path / "again")
    assert not same(adapter(whole), adapter(run(tmp_path / "other", cache, *flags, "--seed", "1")))


def test_a_shorter_run_resumed_ends_on_the_same_bits(whole, cache, tmp_path):
    folder = run(tmp_path / "part", cache, "--steps", "5", "--checkpoint-every", "3", "--kl", "0.01", "--eval-every", "4", *WEIGHTS)
    train.main(["--run", str(folder), "--resume", "--steps", "8"])
    assert same(adapter(whole), adapter(folder)) and metrics(whole) == metrics(folder)
    assert (whole / "evaluation.json").read_text() == (folder / "evaluation.json").read_text()


def test_a_run_that_lost_its_last_steps_takes_them_again(whole, cache, tmp_path):
    folder = run(tmp_path / "lost", cache, "--steps", "8", "--checkpoint-every", "3", "--kl", "0.01", "--eval-every", "4", *WEIGHTS)
    (folder / "checkpoint" / "step-000008.safetensors").unlink()        # as after a crash: step 6 is the last one saved
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    train.main(["--run", str(folder), "--resume"])
    assert same(adapter(whole), adapter(folder)) and metrics(whole) == metrics(folder)


def test_resuming_a_finished_run_changes_nothing(whole):
    before = {file: file.read_bytes() for file in whole.rglob("*") if file.is_file()}
    train.main(["--run", str(whole), "--resume"])
    after = {file: file.read_bytes() for file in whole.rglob("*") if file.is_file()}
    assert before == after


def test_resuming_with_other_settings_is_refused_by_name(whole, capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(["--run", str(whole), "--resume", "--kl", "0.5", "--seed", "0", "--targets", "q_proj"])
    message = capsys.readouterr().err
    assert caught.value.code == 2 and "--kl 0.5" in message and "--targets" in message and "--seed" not in message


def test_ctrl_c_saves_and_resume_goes_on_to_the_same_bits(whole, cache, tmp_path):
    folder = tmp_path / "stopped"
    command = [sys.executable, "train.py", "--run", str(folder), "--cache", str(cache), *QUICK, "--steps", "100",
               "--checkpoint-every", "100", "--kl", "0.01", *WEIGHTS]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not ((folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text().count("\n") >= 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130 and f"--run {folder} --resume" in errors and "Traceback" not in errors
    done = len(metrics(folder))
    assert 2 <= done < 100 and (folder / "checkpoint" / f"step-{done:06d}.safetensors").exists()
    train.main(["--run", str(folder), "--resume", "--steps", str(done + 2)])
    assert [line["step"] for line in metrics(folder)] == list(range(1, done + 3))
    common = min(8, done + 2)
    assert metrics(folder)[:common] == metrics(whole)[:common]


def test_several_epochs_on_a_batch_clip_and_a_schedule_falls(cache, tmp_path):
    flags = ["--epochs", "4", "--learning-rate", "0.01", "--schedule", "linear", "--warmup", "0", "--problems", "16"]
    first = run(tmp_path / "a", cache, "--steps", "3", *flags)
    assert any(line["clip_share"] > 0 for line in metrics(first))
    assert metrics(first)[0]["learning_rate"] == 0.01 and metrics(first)[2]["learning_rate"] == pytest.approx(0.01 / 3)


def test_training_pays_and_costs_strategies(cache, tmp_path):
    """Thirty fast steps: more reward, less entropy. The full story is what `python train.py` prints."""
    train.main(["--run", str(tmp_path / "run"), "--cache", str(cache), "--steps", "30", "--learning-rate", "4e-3",
                "--eval-problems", "100", "--device", "cpu", "--method", "grpo", "--normalise", "std"])
    before, after = (json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines())
    assert after["pass@1"] > 1.15 * before["pass@1"]
    assert after["strategy_entropy"] < before["strategy_entropy"] - 0.3


def test_with_alpha_zero_sus_is_grpo_bit_for_bit(cache, tmp_path):
    bonus = run(tmp_path / "sus", cache, "--steps", "4", "--alpha", "0", "--kl", "0.01")
    plain = run(tmp_path / "grpo", cache, "--steps", "4", "--method", "grpo", "--kl", "0.01")
    assert same(adapter(bonus), adapter(plain))
    some = run(tmp_path / "some", cache, "--steps", "4", "--gate", "none", "--kl", "0.01")
    assert not same(adapter(some), adapter(plain))


@pytest.mark.parametrize("method", train.reward.METHODS)
def test_every_method_trains(method, cache, tmp_path):
    folder = run(tmp_path / method, cache, "--steps", "2", "--method", method, "--gate", "none", "--eval-problems", "2")
    lines = metrics(folder)
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert ("bonus" in lines[0]) == (method != "grpo") and (method == "grpo" or lines[1]["bonus"] != 0)


def test_only_the_oracle_reads_true_strategies(cache, tmp_path, monkeypatch):
    def forbidden(self, response):
        raise AssertionError("a reward looked at the true strategy")
    monkeypatch.setattr(train.Run, "evaluate", lambda self: {"step": self.step, "intervals": {}, "problems": 1, "samples": 1})   # may look
    monkeypatch.setattr(data.Countdown, "strategy_of", forbidden)
    monkeypatch.setattr(data.Countdown, "path_of", forbidden)
    run(tmp_path / "sus", cache, "--steps", "2")
    with pytest.raises(AssertionError, match="true strategy"):
        run(tmp_path / "oracle", cache, "--steps", "2", "--method", "oracle")


def test_a_sentence_encoder_trains_too(cache, tmp_path):
    make_sentence_encoder(tmp_path / "encoder")
    folder = run(tmp_path / "run", cache, "--steps", "2", "--encoder", str(tmp_path / "encoder"), "--reading", "equations")
    assert len(metrics(folder)) == 2


def test_alpha_falls_over_the_run(cache, tmp_path):
    folder = run(tmp_path / "run", cache, "--steps", "4", "--alpha", "2", "--alpha-decay", "0.5")
    assert [line["alpha"] for line in metrics(folder)] == [2.0, 1.0, 0.0, 0.0]


def test_evaluate_reads_everything_from_the_run_folder(whole, cache, capsys, tmp_path):
    evaluate.main([str(whole), "--output", str(tmp_path / "e.json")])
    ours, again = json.loads((whole / "evaluation.json").read_text()), json.loads((tmp_path / "e.json").read_text())
    assert {**again, "step": 8} == ours


def test_batches_cover_every_problem_once_an_epoch(cache, tmp_path):
    config = train.Config(run=str(tmp_path), cache=str(cache), train_problems=10, problems=4, eval_problems=2)
    loop = train.Run(config)
    seen = [i for step in range(5) for i in loop.batch(step)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10] != seen[10:]


BAD = [
    (["--steps", "0"], "--steps"), (["--steps", "-5"], "--steps"), (["--steps", "many"], "whole number"),
    (["--samples", "1"], "--samples"), (["--learning-rate", "0"], "more than 0"), (["--learning-rate", "-1"], "--learning-rate"),
    (["--learning-rate", "nan"], "finite"), (["--kl", "inf"], "finite"), (["--temperature", "0"], "--temperature"),
    (["--problems", "0"], "--problems"), (["--train-problems", "0"], "--train-problems"), (["--rank", "0"], "--rank"),
    (["--nonsense"], "--nonsense"), (["--step", "5"], "--step"), (["--data", "chess"], "chess"), (["--method", "magic"], "magic"),
    (["--normalise", "max"], "max"), (["--targets", "q_proj,lm_head"], "lm_head"), (["--targets", ","], "targets"),
    (["--model", "./nowhere"], "./nowhere"), (["--model", "no/such-model"], "no/such-model"), (["--model", ""], "--model"), (["--device", "tpu"], "tpu"),
    (["--max-new-tokens", "120"], "context of 128"), (["--resume"], "holds no run"), (["--seed", "-1"], "--seed"),
    (["--dtype", "int8"], "int8"), (["--alpha", "-1"], "--alpha"), (["--gate", "open"], "open"), (["--layer", "9"], "--layer 9"),
    (["--encoder", "./nowhere"], "./nowhere"), (["--momentum", "2"], "--momentum"), (["--alpha-decay", "1.5"], "--alpha-decay"), (["--learn-lambdas", "--method", "grpo"], "--learn-lambdas")]


@pytest.mark.parametrize("flags, word", BAD, ids=[" ".join(flags) for flags, _ in BAD])
def test_bad_flags_are_one_line_exit_code_2_and_touch_nothing(flags, word, cache, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(["--run", str(tmp_path / "run"), "--cache", str(cache), "--eval-problems", "5", *flags])
    errors = [line for line in capsys.readouterr().err.splitlines() if line]
    assert caught.value.code == 2 and len(errors) == 1 and errors[0].startswith("error: ") and word in errors[0]
    assert not (tmp_path / "run").exists()


def test_a_run_is_never_written_over(whole, capsys, tmp_path):
    before = (whole / "config.json").read_bytes()
    with pytest.raises(SystemExit) as caught:
        train.main(["--run", str(whole)])
    assert caught.value.code == 2 and "--resume" in capsys.readouterr().err and (whole / "config.json").read_bytes() == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit):
        train.main(["--run", str(tmp_path / "file")])
    assert (tmp_path / "file").read_text() == "mine"


def test_without_a_name_every_run_gets_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "sus-countdown-0-2").mkdir(parents=True)
    (tmp_path / "runs" / "sus-countdown-0-2" / "mine.txt").write_text("not a run, and not to be touched")
    names = [checkpoint.claim(train.Config()).run for _ in range(3)]
    assert names == ["runs/sus-countdown-0", "runs/sus-countdown-0-3", "runs/sus-countdown-0-4"]


def test_a_run_that_cannot_start_takes_back_only_what_it_made(cache, tmp_path, monkeypatch, capsys):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("new", "link"):
        with pytest.raises(SystemExit):
            run(tmp_path / name, cache, "--steps", "1", "--layer", "9")
        assert "--layer 9" in capsys.readouterr().err
    assert not (tmp_path / "new").exists() and list((tmp_path / "real").iterdir()) == []


def test_the_lock_harms_nothing_that_it_points_to(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        checkpoint.lock(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"


def test_paths_are_kept_whole_and_names_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").touch(), (tmp_path / "gsm8k").mkdir()
    found = checkpoint.resolve(train.Config(data="mine.jsonl", model="Qwen/Qwen2.5-1.5B"), set())
    assert found.data == str(tmp_path / "mine.jsonl") and found.model == "Qwen/Qwen2.5-1.5B" and found.encoder == ""
    assert checkpoint.resolve(train.Config(data="gsm8k"), set()).data == "gsm8k"


def test_leftovers_of_another_run_are_not_mixed_in(cache, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(SystemExit):
        run(tmp_path / "run", cache, "--steps", "1")
    assert "not an empty folder" in capsys.readouterr().err


def test_the_previous_checkpoint_is_used_when_the_last_is_damaged(whole, cache, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    file = folder / "checkpoint" / "step-000008.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    train.main(["--run", str(folder), "--resume"])
    assert "step-000008.safetensors cannot be used" in capsys.readouterr().err
    assert same(adapter(whole), adapter(folder)) and metrics(whole) == metrics(folder)


def test_the_adapter_is_as_new_as_the_checkpoint(cache, tmp_path):
    folder = run(tmp_path / "run", cache, "--steps", "1")
    before = adapter(folder)
    train.main(["--run", str(folder), "--resume", "--steps", "2"])
    assert not same(before, adapter(folder))
    saved = load_file(folder / "checkpoint" / "step-000002.safetensors")
    assert all(torch.equal(tensor, saved[f"adapter.{name}"]) for name, tensor in adapter(folder).items())
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"junk")
    train.main(["--run", str(folder), "--resume"])          # nothing is left to train, but the adapter is whole again
    assert all(torch.equal(tensor, saved[f"adapter.{name}"]) for name, tensor in adapter(folder).items())


@pytest.mark.parametrize("flags", [["--schedule", "linear"], ["--alpha-decay", "0.5"]])
def test_more_steps_are_refused_where_they_would_change_the_past(flags, cache, tmp_path, capsys):
    folder = run(tmp_path / "run", cache, "--steps", "2", *flags)
    with pytest.raises(SystemExit):
        train.main(["--run", str(folder), "--resume", "--steps", "4"])
    assert "--steps 4" in (error := capsys.readouterr().err) and "falls over --steps" in error


def test_a_run_that_is_not_there_and_one_too_large_for_the_memory(cache, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.main(["--run", str(tmp_path / "nothing"), "--resume"])
    assert "holds no run to resume" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "large", cache, "--steps", "1", "--eval-samples", str(10 ** 15))
    assert caught.value.code == 2 and "not enough memory" in capsys.readouterr().err


def test_fewer_steps_than_were_taken(whole, capsys):
    with pytest.raises(SystemExit):
        train.main(["--run", str(whole), "--resume", "--steps", "3"])
    assert "8 steps already" in capsys.readouterr().err


def edit_checkpoints(change):
    """Rewrite all checkpoints of a run with something wrong inside."""
    def damage(folder):
        for file in checkpoint.find(folder):
            tensors, header = load_file(file), checkpoint.read_metadata(file)
            change(tensors, header)
            save_file(tensors, file, header)
    return damage


def value(name, wrong):
    return edit_checkpoints(lambda tensors, header: header.update(values=json.dumps(json.loads(header["values"]) | {name: wrong})))


def tensor(name, make):
    return edit_checkpoints(lambda tensors, header: tensors.update({name: make(tensors[name])}))


def rewrite(**changes):
    def damage(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return damage


DAMAGES = [
    (lambda f: (f / "config.json").write_text("{"), "JSON"), (lambda f: (f / "config.json").write_text("{}"), "version"),
    (lambda f: [file.write_bytes(b"junk") for file in (f / "checkpoint").iterdir()], "no checkpoint"),
    (rewrite(targets=["q_proj"]), "no checkpoint"), (rewrite(steps="abc"), "steps"), (rewrite(learning_rate=None), "learning_rate"),
    (rewrite(samples=1), "samples"), (rewrite(seed="x"), "seed"), (rewrite(model=None), "model"), (rewrite(targets=5), "targets"),
    (rewrite(dtype="int8"), "dtype"), (rewrite(warmup=-1), "warmup"), (rewrite(kl=float("nan")), "kl"),
    (lambda f: (f / "metrics.jsonl").write_text("garbage}\n"), "metrics.jsonl"), (rewrite(kl=10 ** 400), "kl"),
    (value("added", "x"), "no checkpoint"), (value("added", -5), "no checkpoint"), (value("clusters", [1]), "no checkpoint"),
    (value("clusters", {"0": "many"}), "no checkpoint"), (tensor("strategy.recent.response", lambda t: t[:3].clone()), "no checkpoint"),
    (tensor("strategy.centres", lambda t: t[:, :3].clone()), "no checkpoint"),
    (edit_checkpoints(lambda tensors, header: tensors.pop("strategy.outcomes.query")), "no checkpoint"),
    (edit_checkpoints(lambda tensors, header: header.update(step="-3")), "no checkpoint"),
    (edit_checkpoints(lambda tensors, header: header.update(step="four")), "no checkpoint"),
    (edit_checkpoints(lambda tensors, header: [tensors.pop(name) for name in [*tensors] if "exp_avg_sq" in name]), "no checkpoint"),
    (lambda f: edit_checkpoints(lambda tensors, header: [t.fill_(math.nan) for n, t in tensors.items() if n.startswith("adapter")])(f), "no checkpoint"),
    (lambda f: edit_checkpoints(lambda tensors, header: tensors.update({n: t[:1].clone() for n, t in tensors.items() if "exp_avg" in n}))(f), "no checkpoint"),
    (lambda f: (f / "evaluations.jsonl").write_text('{"a": 1}\n'), "evaluations.jsonl"),
    (lambda f: (f / "evaluations.jsonl").write_text('{"step": 0, "pass@1": 0.5, "intervals": {}}\n'), "evaluations.jsonl"),
    (lambda f: (f / "evaluations.jsonl").write_text('{"step": 0, "pass@1": "high", "intervals": {"pass@1": [0, 1]}}\n'), "evaluations.jsonl"),
    (lambda f: shutil.rmtree(f / "checkpoint"), "no checkpoint to go on from"),
    (lambda f: (f / "ruler.safetensors").write_bytes(b"junk"), "without cluster entropies")]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_a_damaged_run_is_one_clear_error(number, whole, tmp_path, capsys):
    damage, word = DAMAGES[number]
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    damage(folder)
    kept = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(SystemExit) as caught:
        train.main(["--run", str(folder), "--resume"])
    errors = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith("warning")]
    assert caught.value.code == 2 and len(errors) == 1 and word in errors[0]
    assert kept == {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_without_its_evaluations_a_run_still_goes_on(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy" / "evaluations.jsonl").unlink()
    train.main(["--run", str(tmp_path / "copy"), "--resume"])
    assert (tmp_path / "copy" / "evaluation.json").read_text() == (whole / "evaluation.json").read_text()


@pytest.mark.parametrize("place", ["/proc/nowhere/run", "README.md/run", "x" * 300])
def test_places_that_cannot_be_written(place, cache, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as caught:
        run(place, cache, "--steps", "1")
    assert caught.value.code == 2 and capsys.readouterr().err.startswith("error: ")


def test_help_is_a_manual(capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for word in ("--run", "--steps", "--seed", "--resume", "--method", "--model", "--data", "--problems", "--samples",
                 "--normalise", "--kl", "--learning-rate", "--rank", "The model", "The objective", "(default 200)"):
        assert word in text


def test_export_is_a_folder_that_transformers_continues_alike(whole, cache, tmp_path):
    evaluate.main([str(whole), "--export", str(tmp_path / "merged"), "--cache", str(cache)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    policy = evaluate.open_policy("tiny", "countdown", str(cache), "cpu", "float32")
    train.lora.load(policy.model, whole / "adapter")
    problems = data.load("countdown", "test", 20)
    ours = policy.decode(train.sample.generate(policy.model, policy.encode(problems), 1, 16, 0.0, policy.eos_ids, torch.Generator()))
    for problem, text in zip(problems, ours):
        ids = tokenizer(problem.prompt, return_tensors="pt").input_ids
        continued = theirs.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, ids.shape[1]:]
        assert tokenizer.decode(continued, skip_special_tokens=True) == text
    for folder, library in ((tmp_path / "merged", "transformers"), (whole / "adapter", "peft")):
        card = (folder / "README.md").read_text()
        assert card.startswith("---\nlicense: other\n") and f"library_name: {library}" in card and "| pass@1 |" in card
        assert f"{len(metrics(whole))} steps" in card
    with pytest.raises(SystemExit):
        evaluate.main([str(whole), "--export", str(tmp_path / "merged"), "--cache", str(cache)])
    with pytest.raises(SystemExit):
        evaluate.main(["tiny", "--export", str(tmp_path / "other"), "--cache", str(cache)])


def test_logs_on_request(cache, tmp_path, capsys, monkeypatch):
    logged = []
    fake = type("W", (), {"init": staticmethod(lambda **options: type("R", (), {"log": staticmethod(logged.append)}))})
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run(tmp_path / "run", cache, "--steps", "2", "--method", "grpo", "--wandb")
    assert [metrics["step"] for metrics in logged] == [1, 2]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit):
        run(tmp_path / "other", cache, "--steps", "2", "--method", "grpo", "--wandb")
    assert "pip install wandb" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_training_on_questions_of_ones_own(cache, tmp_path):
    """The tiny model cannot read, but everything between the file and the adapter can be seen to work."""
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"question": f"{a}+{b}=", "answer": a + b}) + "\n" for a in range(9) for b in range(9)))
    folder = run(tmp_path / "run", cache, "--steps", "2", "--data", str(file), "--model", str(cache / "tiny-countdown"),
                 "--max-new-tokens", "4", "--prompt", "plain", "--sus-baseline", "none")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["strategy_entropy"] is None and evaluation["cluster_entropy"] is not None
    records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(records) == len(data.load(str(file), "test", 8)) and records[0]["question"].endswith("=") and set(records[0]["responses"][0]) == {"text", "correct", "cluster", "place", "intrinsic", "ss", "sus"}
    for response in records[0]["responses"]:                # what training would have paid: lambda_SS 1, lambda_SuS 0.5
        assert response["intrinsic"] == pytest.approx(response["ss"] + 0.5 * response["sus"], abs=1e-5)
    before = json.loads((folder / "samples-before.jsonl").read_text().splitlines()[0])
    assert "intrinsic" not in before["responses"][0]        # there, the networks had seen nothing yet
    assert (folder / "samples.md").read_text().startswith("# Samples")
