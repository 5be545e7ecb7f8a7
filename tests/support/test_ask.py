"""--ask: what the terminal shows, and what is said of a text that is no problem."""
import builtins
import re
from fractions import Fraction
from pathlib import Path

import pytest

import evaluate
import lora
import sample
from data import Countdown, Question
from support import ask, parallel
from tests.test_train import quick_world, run  # noqa: F401 (a fixture)


def responses(*texts, **more):
    return [{"text": text, "correct": float(text.startswith("r")), "cluster": 3, "place": [0, 0],
             **more} for text in texts]


def test_a_countdown_problem_is_read_and_judged():
    for text in ("use 3,8,5 to make 19:", "  use 3,8,5 to make 19", "Use 3, 8, 5 to make 19 :"):
        assert ask.find_problem("countdown", text) == (Countdown((3, 8, 5), 19), True)
        assert not ask.find_problem("countdown-calculations", text)[0].rules.use_all
    for text in ("", "use 3 to make 3:", "3,8 19", "use 3,8 to make -1:", "use 99999,1 to make 2",
                 "use 1,2,3,4,5 to make 9"):
        with pytest.raises(ValueError, match="expected .*use 2,15,2 to make 11:"):
            ask.find_problem("countdown", text)


def test_a_question_of_the_file_is_judged_and_a_new_one_is_not(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(f'{{"question": "{split}?", "answer": 7}}\n')
    assert ask.find_problem(str(tmp_path), "train?") == (Question("train?", Fraction(7)), True)
    assert ask.find_problem(str(tmp_path), " validation? ")[1]
    problem, known = ask.find_problem(str(tmp_path), "What is 1 + 1?")
    assert not known and "What is 1 + 1?" in problem.prompt


def test_a_task_of_ones_own_is_asked_as_it_is(monkeypatch):
    problem = Question("known", Fraction(1))
    monkeypatch.setattr(ask.data, "load", lambda task, split: [problem])
    assert ask.find_problem("mine:tasks", "known") == (problem, True)
    asked, known = ask.find_problem("mine:tasks", "The capital of Peru is")
    assert asked.prompt == "The capital of Peru is" and not known


def test_columns_count_and_judge():
    page = ask.make_page("why?", {
        "base model": responses("wrong", "right", "wrong", strategy="+*"),
        "after 9 steps": responses("right", "right", "right", strategy="++")}, True, True)
    head, _, titles, _, first, second = page.splitlines()
    assert head == "why?"
    assert titles.split("  ")[0] == "base model: 1 of 3 right"
    assert titles.endswith("after 9 steps: 3 of 3 right")
    assert first.split() == ["1x", "right", "+*", "right", "3x", "right", "++", "right"]
    assert second.split() == ["2x", "wrong", "+*", "wrong"]  # right ones first


def test_an_illegal_response_is_called_so():
    page = ask.make_page("q", {"m": responses("wrong", strategy=None)}, True, True)
    assert page.splitlines()[-1].split() == ["1x", "illegal", "wrong"]


def test_long_answers_are_wrapped_into_80_columns_and_cannot_steer_the_terminal():
    long = "right " + "a number of words " * 12 + "\x1b[2J\nnext line \u4e2d"
    page = ask.make_page("q " * 100, {"base model": responses(long), "after 1 steps":
                                      responses("w" * 300)}, True, False)
    assert max(map(len, page.splitlines())) <= 80
    assert "\x1b" not in page and "next line" in page and "cluster" not in page
    assert "".join(page.split()).count("w") >= 300  # nothing is lost


def test_without_a_known_answer_there_is_no_verdict():
    page = ask.make_page("q", {"the model": responses("wrong", "right")}, False, True)
    assert "right" in page.split("\n", 3)[3] and "of 2 right" not in page
    assert "1x cluster 3:  wrong" in page


def test_only_the_commonest_are_shown():
    page = ask.make_page("q", {"m": responses(*map(str, range(20)), "3")}, True, False)
    assert "and 14 more" in page and " 2x wrong    3" in page


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache, quick_world):  # noqa: F811
    return run(tmp_path_factory.mktemp("ask") / "mine", cache, "--steps", "2", "--gate", "none",
               "--learning-rate", "0.1")


def test_base_and_trained_model_answer(folder, capsys):
    evaluate.main([str(folder), "--ask", "use 3,8,5 to make 19:"])
    page = capsys.readouterr().out
    assert "use 3,8,5 to make 19:" in page
    assert "base model: " in page and "after 2 steps: " in page
    rows = [line for line in page.splitlines() if re.search("[0-9]x (right|wrong|illegal)", line)]
    assert rows and any(line[:38] != line[40:78] for line in rows)  # training changed something
    evaluate.main([str(folder), "--ask", "use 3,8,5 to make 19:"])
    assert capsys.readouterr().out == page


def test_it_asks_until_an_empty_line(folder, capsys, monkeypatch):
    lines = iter(["use 3,8,5 to make 19:", "nonsense", "use 1,2,3 to make 6:", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    evaluate.main([str(folder), "--ask"])
    page = capsys.readouterr().out
    assert page.count("base model") == 2 and "error: 'nonsense'" in page
    assert next(lines, None) is None

    def end(prompt):
        raise EOFError
    monkeypatch.setattr(builtins, "input", end)
    evaluate.main([str(folder), "--ask"])  # Ctrl-D


def test_a_model_without_a_run_answers_alone(cache, capsys):
    evaluate.main(["tiny", "--cache", str(cache), "--ask", "use 3,8,5 to make 19:"])
    page = capsys.readouterr().out
    assert "the model: " in page and "base model" not in page


def test_mistakes_are_one_line(folder, capsys, monkeypatch):
    with pytest.raises(SystemExit) as stopped:
        evaluate.main([str(folder), "--ask", "what?"])
    assert stopped.value.code == 2 and "expected" in capsys.readouterr().err
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="torchrun"):
        patch.setattr(parallel, "world", lambda: 2)
        ask.talk("q", None, None, 0, None, 0)
    with pytest.raises(SystemExit):
        evaluate.main([str(folder), "--ask", "use 1,2 to make 3", "--export", "somewhere"])
    assert "leave out --output and --export" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate.main([str(folder), "--ask", ""])
    assert "expected" in capsys.readouterr().err


def test_another_seed_gives_other_answers_and_a_problem_without_solution_is_told(folder, capsys):
    pages = []
    for seed in ("0", "1"):
        evaluate.main([str(folder), "--ask", "use 1,1 to make 99", "--seed", seed])
        pages.append(capsys.readouterr().out)
    assert pages[0] != pages[1] and "(it has no solution)" in pages[0]


def test_the_base_model_answers_as_it_did_before_training(folder):
    policy, clustering, step = evaluate.open_run(folder)
    for name, adapter in lora.parameters(policy.model).items():
        if "lora_B" in name:
            adapter.data.normal_(0, 0.1)
    problem, _ = ask.find_problem("countdown-many", "use 3,8,5 to make 19:")
    before, after = ask.answer(problem, policy, clustering, step, evaluate.evaluate, 0).values()
    assert before != after
    bare = sample.open_policy(Path(policy.base), policy.config)
    alone = evaluate.evaluate(bare, [problem], policy.config, clustering).records[0]["responses"]
    assert before == alone
