"""What people read of a run: the table, samples.md, the summary, model cards, loggers, signals."""
import json
import math
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch

import data
import train
from support import files, report
from support.config import Config
from tests.test_train import metrics, quick_world, read_lines, run  # noqa: F401 (a fixture)

NUMBERS = {"pass@1": 0.125, "pass@5": 0.5, "pass@16": None, "strategy_entropy": 1.5,
           "cluster_entropy": None, "valid": 1.0, "distinct": 0.25, "problems": 20, "samples": 5,
           "step": 7, "intervals": {"pass@1": [0.1, 0.15], "pass@5": [0.4, 0.6],
                                    "strategy_entropy": [1.25, 1.75], "valid": [0.9, 1.0],
                                    "distinct": [0.2, 0.3]}}


def row(text: str, name: str) -> list[str]:
    """The words of a table's row behind its name."""
    lines = [line for line in text.splitlines() if line.startswith(name)]
    assert len(lines) == 1
    return lines[0].removeprefix(name).split()


def test_the_table_shows_every_number_with_its_interval():
    text = report.table({"before": NUMBERS, "after": {**NUMBERS, "pass@1": 0.2}})
    assert text.splitlines()[0].split() == ["before", "after"]
    assert row(text, "pass@1 ") == ["12.5", "(10.0", "to", "15.0", "%)", "20.0", "(10.0", "to",
                                    "15.0", "%)"]
    assert row(text, "pass@16") == ["-", "-"]
    assert row(text, "strategy entropy")[:4] == ["1.50", "(1.25", "to", "1.75)"]
    assert row(text, "cluster entropy") == ["-", "-"]
    assert row(text, "valid")[0] == "100.0"
    assert len({len(line) for line in text.splitlines()}) == 1  # columns stand under each other
    assert len(text.splitlines()) == 1 + len(report.METRICS)


def summary(tmp_path, before: dict | None, after: dict, lines=()) -> str:
    files.write_lines(tmp_path / "metrics.jsonl", list(lines))
    return report.summary(tmp_path, before, after)


def lost(tmp_path, before: dict, after: dict) -> list[str]:
    text = summary(tmp_path, {**NUMBERS, "strategies": before}, {**NUMBERS, "strategies": after})
    found = [line for line in text.splitlines() if line.startswith("lost strategies: ")]
    return found[0].removeprefix("lost strategies: ").split() if found else []


def test_a_strategy_is_lost_when_one_in_a_thousand_is_left(tmp_path):
    before = {"++": 0.5, "+-": 0.3, "*-": 0.19, "**": 0.009}
    assert lost(tmp_path, before, {"++": 1.0}) == ["+-", "*-"]  # ** was hardly there
    assert lost(tmp_path, before, {"++": 0.6, "+-": 0.3999, "*-": 0.0001}) == ["*-"]
    assert lost(tmp_path, before, {"++": 0.7, "+-": 0.298, "*-": 0.002}) == []  # rare, but there
    assert lost(tmp_path, before, before) == []
    assert lost(tmp_path, {"++": 1.0}, before) == []  # new ones are not lost
    assert lost(tmp_path, {"++": 0.99, "+-": 0.01}, {"++": 1.0}) == ["+-"]


def test_the_summary_compares_before_and_after_and_says_where_the_run_is(tmp_path):
    text = summary(tmp_path, NUMBERS, NUMBERS)
    assert text.splitlines()[0].split() == ["before", "after", "7", "steps"]
    assert f"the run is in {tmp_path}" in text
    assert f"python -m experiments.plot {tmp_path}" in text
    assert "lost" not in text
    assert "skipped" not in text
    alone = summary(tmp_path, None, NUMBERS)  # its first evaluation was lost
    assert alone.splitlines()[0].split() == ["after", "7", "steps"]
    assert "lost" not in summary(tmp_path, {**NUMBERS, "strategies": None}, NUMBERS)


def test_the_summary_counts_skipped_steps(tmp_path):
    lines = [{"step": step, "skipped": int(step in (2, 5))} for step in range(1, 8)]
    assert "2 of 7 steps were skipped" in summary(tmp_path, NUMBERS, NUMBERS, lines)


@pytest.mark.parametrize("shares, word", [([0, 0, 0], "correct"), ([1.0, 1.0], "wrong"),
                                          ([0, 0.1], None), ([], None)])
def test_the_summary_says_when_there_was_nothing_to_learn_from(shares, word, tmp_path):
    lines = [{"step": step, "correct": share} for step, share in enumerate(shares, 1)]
    text = summary(tmp_path, NUMBERS, NUMBERS, lines)
    assert (f"no response was ever {word}" in text) is (word is not None)
    assert ("nothing to learn" in text) is (word is not None)


def test_training_problems_in_the_evaluation_are_counted(capsys):
    problems = [data.Countdown((1, 2, n), 6) for n in range(5)]
    report.say_overlap(problems[:3], problems[2:])
    assert "1 of the 3 problems of the evaluation" in capsys.readouterr().err
    report.say_overlap(problems[:3], problems[3:])
    assert capsys.readouterr().err == ""


def test_numbers_that_json_does_not_know_become_null():
    found = report.only_finite({"a": 1.5, "b": math.nan, "c": math.inf, "d": 3, "e": -math.inf})
    assert found == {"a": 1.5, "b": None, "c": None, "d": 3, "e": None}


def response(text, correct, cluster):
    return {"text": text, "correct": correct, "cluster": cluster, "place": [0, 0],
            "strategy": "++" if correct else None}


def test_samples_for_people():
    text = report.samples_page([
        {"question": "one", "responses": [response("a", 1.0, 0)] * 3},
        {"question": "two", "responses": [response("c", 1.0, 0), response("b", 0.0, 0),
                                          response("d", 0.0, 4)]}])
    assert text.startswith("# Samples\n")
    assert text.index("## two") < text.index("## one")  # the most clusters first
    assert "Right, cluster 0 (2 of 3 responses), strategy ++:" in text
    assert "Wrong, cluster 4 (1 of 3 responses):" in text
    assert "```\nc\n```" in text
    assert "```\nb\n```" not in text  # the right one stands for its cluster


def test_samples_are_of_five_problems_at_most():
    records = [{"question": f"q{n}", "responses": [response("a", 0.0, 0)]} for n in range(9)]
    assert report.samples_page(records).count("\n## ") == 5


def test_a_record_says_what_each_response_is():
    problem = data.Countdown((1, 2, 3), 6)
    found = report.make_record(problem, ["1+2=3;3+3=6", "no"], [4, 0], [[1.0, 2.0], [3.0, 4.0]])
    assert found == {"question": "use 1,2,3 to make 6:", "responses": [
        {"text": "1+2=3;3+3=6", "correct": 1.0, "cluster": 4, "place": [1.0, 2.0],
         "strategy": "++"},
        {"text": "no", "correct": 0.0, "cluster": 0, "place": [3.0, 4.0], "strategy": None}]}
    question = data.Question("What is 2+3?", 5)
    found = report.make_record(question, ["#### 5"], [0], [[0.0, 0.0]])
    assert found["question"] == "What is 2+3?"
    assert "strategy" not in found["responses"][0]


def test_an_evaluations_files(tmp_path):
    clustering = torch.nn.Linear(1, 1)
    for step in (0, 5):
        records = [{"question": f"at {step}", "responses": [response("a", 1.0, 0)]}]
        evaluation = SimpleNamespace(records=records, clustering=clustering)
        report.write_evaluation(tmp_path, {"step": step}, evaluation)
    assert read_lines(tmp_path / "evaluations.jsonl") == [{"step": 0}, {"step": 5}]
    assert json.loads((tmp_path / "evaluation.json").read_text()) == {"step": 5}
    assert read_lines(tmp_path / "samples-before.jsonl")[0]["question"] == "at 0"
    assert read_lines(tmp_path / "samples.jsonl")[0]["question"] == "at 5"
    assert "## at 5" in (tmp_path / "samples.md").read_text()
    assert files.read_tensors(tmp_path / "clustering.safetensors").keys() == {"weight", "bias"}


def policy_of(config: Config, base: str):
    """What a card needs of a policy."""
    tokenizer = SimpleNamespace(decode=lambda ids: f"prompt {ids}")
    return SimpleNamespace(config=config, base=base, tokenizer=tokenizer,
                           encode=lambda problems: [len(each.prompt) for each in problems])


PROBLEM = data.Countdown((1, 2, 3), 6)


@pytest.mark.parametrize("merged", [True, False])
def test_a_model_card_says_what_the_model_is(merged, tmp_path):
    config = Config(data="gsm8k", seed=3, alpha=0.5, eval_split="validation")
    policy = policy_of(config, "Qwen/Qwen2.5-1.5B")
    report.write_card(tmp_path, policy, PROBLEM, 40, NUMBERS, merged)
    card = (tmp_path / "README.md").read_text()
    start, header, body = card.split("---\n")
    assert start == ""
    assert "license: other\n" in header
    assert "base_model: Qwen/Qwen2.5-1.5B\n" in header
    assert "datasets: [openai/gsm8k]\n" in header
    assert f"library_name: {'transformers' if merged else 'peft'}\n" in header
    assert "# Qwen2.5-1.5B, trained with sus on gsm8k\n" in body
    assert "after 40 steps of GRPO and the intrinsic reward `sus`" in body
    assert "`sus` with alpha 0.5" in body and "seed 3, kl 0.03" in body
    assert "from transformers import AutoModelForCausalLM" in body
    assert "prompt 20" in body
    assert "20 validation problems, 5 responses each at temperature 1.0" in body
    assert row(body, "pass@1 ")[:4] == ["12.5", "(10.0", "to", "15.0"]
    assert ("PeftModel" in body) is not merged


def test_a_model_card_names_no_folder_of_this_machine_as_base(tmp_path):
    policy = policy_of(Config(method="grpo", data=str(tmp_path / "sums.jsonl")), str(tmp_path))
    report.write_card(tmp_path, policy, PROBLEM, 1, NUMBERS, merged=True)
    card = (tmp_path / "README.md").read_text()
    assert str(tmp_path.parent) not in card
    assert "base_model:" not in card
    assert "datasets:" not in card
    assert "intrinsic reward" not in card


# Loggers.


def fake_wandb(logged: list, options: dict):
    def init(**given):
        options.update(given)
        return SimpleNamespace(log=logged.append)
    return SimpleNamespace(init=init)


def test_weights_and_biases_gets_every_step(cache, tmp_path, monkeypatch):
    logged, options = [], {}
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(logged, options))
    folder = run(tmp_path / "mine", cache, "--steps", "2", "--method", "grpo", "--wandb")
    assert [line["step"] for line in logged] == [1, 2]
    assert [line["correct"] for line in logged] == [line["correct"] for line in metrics(folder)]
    assert options["name"] == "mine"
    assert options["dir"] == str(folder)
    assert options["config"]["steps"] == 2


def test_tensorboard_gets_every_number_of_every_step(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def flush(self):
            written.append("flushed")
    module = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log, = report.open_loggers(Config(run=str(tmp_path), tensorboard=True))
    log({"step": 3, "correct": 0.5})
    assert written == [str(tmp_path), ("step", 3, 3), ("correct", 0.5, 3), "flushed"]


def test_no_logger_unless_asked_for():
    assert report.open_loggers(Config()) == []


@pytest.mark.parametrize("service, module", [("wandb", "wandb"),
                                             ("tensorboard", "torch.utils.tensorboard")])
def test_a_service_that_is_not_there_is_one_clear_error(service, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"{module.split('.')[-1]}.*install the package"):
        report.open_loggers(Config(**{service: True}))


def test_a_service_that_refuses_is_one_clear_error(monkeypatch):
    def init(**options):
        raise PermissionError("no login")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ValueError, match="no login"):
        report.open_loggers(Config(wandb=True))


def test_a_missing_logger_is_said_before_anything_is_computed(cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit):
        run(tmp_path / "run", cache, "--steps", "2", "--method", "grpo", "--wandb")
    assert "wandb" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# Ctrl-C.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_ends_the_program(number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit, match="stopped at once"):
        with report.catch_signals() as asked:
            assert asked == []
            os.kill(os.getpid(), number)
            assert asked == [number]
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_signals_are_as_before_when_all_is_done():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with report.catch_signals():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_says_what_it_did(cache, tmp_path, capsys):
    folder = run(tmp_path / "run", cache, "--steps", "1", "--method", "grpo")
    printed = capsys.readouterr().out
    before, after = read_lines(folder / "evaluations.jsonl")
    assert report.summary(folder, before, after) in printed
    card = (folder / "adapter" / "README.md").read_text()
    assert report.table({"": after}) in card
    assert train.__doc__.splitlines()[0] not in printed
