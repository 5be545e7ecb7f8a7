"""Countdown: the judge by hand and by brute force, and splits that cannot meet."""
import itertools
import json
import os
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from data import Countdown

PROBLEM = Countdown((3, 8, 5), 19)


def test_the_prompt():
    assert PROBLEM.prompt == "use 3,8,5 to make 19:"


@pytest.mark.parametrize("response, legal, right", [
    ("8*3=24;24-5=19", True, True), ("3*8=24;24-5=19", True, True), ("3+8=11;5+11=16", True, False),
    ("8*3=24", False, False), ("8*3=24;24-5=19;", False, False), (";8*3=24;24-5=19", False, False),
    ("8*3=25;25-5=20", False, False),               # wrong arithmetic
    ("8*3=24;24-4=20", False, False),               # a number nobody gave
    ("8*8=64;64-5=59", False, False),               # a number used twice
    ("8*3=24;8-5=3", False, False),                 # the same, later
    ("5-8=-3;-3+3=0", False, False),                # negative numbers are not on the table
    ("08*3=24;24-5=19", False, False), ("8*3=24;24-5=19 ", False, False), ("8*3=24;24-5=19\n", False, False),
    ("8 * 3 = 24;24-5=19", False, False), ("8*3=24,24-5=19", False, False), ("8/3=2;2-5=3", False, False),
    ("٨*٣=24;24-5=19", False, False), ("", False, False), ("19", False, False),
    ("use 3,8,5 to make 19:8*3=24;24-5=19", False, False),
    ("__import__('os')", False, False), ("8**3=512;512-5=507", False, False)])
def test_the_judge_by_hand(response, legal, right):
    assert PROBLEM.valid(response) is legal
    assert PROBLEM.judge(response) == float(right)
    assert (PROBLEM.strategy_of(response) is None) is not legal


def test_strategies_by_hand():
    assert PROBLEM.strategy_of("8*3=24;24-5=19") == "*-"
    assert PROBLEM.path_of("8*3=24;24-5=19") == PROBLEM.path_of("3*8=24;24-5=19") == "*- 1,3"
    assert PROBLEM.path_of("5+3=8;8-8=0") == "+- 1,2"       # either 8 may be meant, the operands are the same
    four = Countdown((1, 2, 3, 4), 10)
    assert four.strategy_of("1+2=3;3+3=6;6+4=10") == "+++" and four.judge("1+2=3;3*4=12;12-3=9") == 0
    assert Countdown((2, 2, 5), 9).judge("2+2=4;4+5=9") == 1 and not Countdown((2, 3, 5), 9).valid("2+2=4;4+5=9")


def plays(numbers):
    """Every legal play by brute force -> (response, result)."""
    if len(numbers) == 1:
        yield [], numbers[0]
        return
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        for sign in "+-*":
            result = {"+": numbers[i] + numbers[j], "-": numbers[i] - numbers[j], "*": numbers[i] * numbers[j]}[sign]
            if result >= 0:
                for steps, last in plays(rest + [result]):
                    yield [f"{numbers[i]}{sign}{numbers[j]}={result}", *steps], last


def test_the_judge_agrees_with_brute_force():
    for problem in data.load("countdown", "test", 40):
        legal = {";".join(steps): result for steps, result in plays(list(problem.numbers))}
        assert problem.target in legal.values()             # every problem can be solved
        for response, result in legal.items():
            assert problem.valid(response) and problem.judge(response) == (result == problem.target)


def test_random_attempts_are_legal_and_cover_all_strategies():
    rng, seen = random.Random(0), set()
    for size in (3, 4):
        for _ in range(1000):
            numbers = data.random_problem(size, rng).numbers
            response, result = data.attempt(numbers, rng)
            assert Countdown(numbers, result).judge(response) == 1 and result <= data.LARGEST_RESULT
            seen.add(Countdown(numbers, result).strategy_of(response))
    assert {len(s) for s in seen} == {2, 3} and len([s for s in seen if len(s) == 2]) == 9


def test_splits_are_disjoint_whatever_the_seeds_and_deterministic():
    def keys(problems):
        return [(tuple(sorted(p.numbers)), p.target) for p in problems]
    train, validation, test = ({key for seed in range(3) for key in keys(data.load("countdown", split, count, seed))}
                               for split, count in (("train", 2000), ("validation", 200), ("test", 200)))
    assert not train & test and not train & validation and not validation & test
    assert data.load("countdown4", "train", 50, 7) == data.load("countdown4", "train", 50, 7)
    assert data.load("countdown", "train", 50, 7) != data.load("countdown", "train", 50, 8)


def test_adding_all_numbers_solves_one_problem_in_three_and_one_in_four_where_none_repeats():
    for split, count, low, high in (("train", 1000, 0.28, 0.38), ("test", 200, 0.2, 0.28)):
        problems = data.load("countdown", split, count)
        assert low < sum(sum(problem.numbers) == problem.target for problem in problems) / count < high


def test_no_problem_is_measured_twice_until_there_are_no_more():
    for split in ("test", "validation"):
        keys = [(tuple(sorted(problem.numbers)), problem.target) for problem in data.load("countdown", split, 200)]
        assert len(set(keys)) == 200
    keys = [(tuple(sorted(problem.numbers)), problem.target) for problem in data.load("countdown", "test", 1000)]
    assert 800 < len(set(keys)) < 1000


@pytest.mark.parametrize("name, count, word", [("chess", 5, "chess"), ("countdown", 0, "at least one")])
def test_what_cannot_be_loaded(name, count, word):
    with pytest.raises(ValueError, match=word):
        data.load(name, "test", count)


@settings(max_examples=1500, deadline=None)
@given(st.one_of(st.text(), st.text(alphabet="0123456789+-*=;", max_size=40),
                 st.lists(st.tuples(st.integers(0, 99), st.sampled_from("+-*"), st.integers(0, 99), st.integers(0, 999)))
                 .map(lambda steps: ";".join(f"{a}{o}{b}={c}" for a, o, b, c in steps))))
def test_the_judge_takes_any_text(response):
    assert PROBLEM.judge(response) in (0.0, 1.0)
    if PROBLEM.judge(response):
        assert response in {";".join(steps) for steps, result in plays([3, 8, 5]) if result == 19}


def test_hostile_text_takes_no_time():
    begin = time.perf_counter()
    for text in ("9" * 10 ** 6, ";" * 10 ** 6, "8*3=" * 10 ** 6, "(" * 10 ** 6, "1+" * 10 ** 6, "\0" * 10 ** 6):
        assert PROBLEM.judge(text) == 0
    small = time.perf_counter() - begin
    assert small < 1                                        # a million characters each: anything but linear takes hours


def write_lines(file, *records):
    file.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return file


def test_questions_from_a_file_and_a_folder(tmp_path):
    records = [{"question": f"What is {n} + 1?", "answer": f"Add one.\n#### {n + 1:,}"} for n in range(2000)]
    file = write_lines(tmp_path / "all.jsonl", *records)
    splits = {split: data.load(str(file), split, 0) for split in ("train", "validation", "test")}
    assert sum(map(len, splits.values())) == 2000 and len({p.question for problems in splits.values() for p in problems}) == 2000
    assert 1350 < len(splits["train"]) < 1650 and len(data.load(str(file), "test", 7)) == 7
    problem = splits["test"][0]
    assert problem.judge(f"so it is ${problem.answer}.") == 1 and problem.judge("no idea") == 0
    assert problem.judge(f"#### {problem.answer}\nQuestion: what is 2 + 2?\nAnswer: 4") == 1      # its own next question
    write_lines(tmp_path / "folder-test.jsonl", *records[:3])
    (tmp_path / "folder").mkdir()
    write_lines(tmp_path / "folder" / "train.jsonl", *records[3:10], "")
    write_lines(tmp_path / "folder" / "test.jsonl", {"question": "half?", "answer": 0.5}, {"question": "three?", "answer": 3})
    assert len(data.load(str(tmp_path / "folder"), "train", 100)) == 7
    assert {p.answer for p in data.load(str(tmp_path / "folder"), "test", 0)} == {Fraction(1, 2), Fraction(3)}
    write_lines(tmp_path / "folder" / "pretrain-latest.jsonl", *records[:3])           # other words are no split's name
    assert len(data.load(str(tmp_path / "folder"), "train", 100)) == 7
    with pytest.raises(ValueError, match="no validation split"):
        data.load(str(tmp_path / "folder"), "validation", 5)
    first = data.load(str(file), "train", 50, 1)
    assert first == data.load(str(file), "train", 50, 1) != data.load(str(file), "train", 50, 2)


@pytest.mark.parametrize("line, word", [
    ("{", "not valid JSON"), ("[]", "expected an object"), ('{"answer": "3"}', "question"), ('{"question": " ", "answer": "3"}', "question"),
    ('{"question": "q"}', "answer is 'None'"), ('{"question": "q", "answer": "Paris"}', "'Paris'"), ('{"question": "q", "answer": true}', "True"),
    ('{"question": "q", "answer": [3]}', "[3]"), ("\udcff", "not valid JSON"), ("[" * 100000, "not valid JSON")])
def test_a_malformed_line_is_named(tmp_path, line, word):
    file = tmp_path / "q.jsonl"
    good = b'{"question": "q", "answer": "3"}\n'
    file.write_bytes(good + b"\n" + line.encode(errors="surrogateescape") + b"\n" + good)
    with pytest.raises(ValueError) as error:
        data.load(str(file), "train", 0)
    assert f"{file}, line 3" in str(error.value) and word in str(error.value)


def test_an_empty_file_and_an_unknown_name(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, word in ((tmp_path / "empty.jsonl", "holds no problem"), (tmp_path / "missing.jsonl", "expected countdown"), (tmp_path, "no train split"), ("/dev/null", "expected countdown"), ("", "expected countdown")):
        with pytest.raises(ValueError, match=word):
            data.load(str(name), "train", 0)


@pytest.mark.skipif(not os.environ.get("SUS_GSM8K"), reason="SUS_GSM8K does not name a folder with GSM8K's train.jsonl and test.jsonl")
def test_gsm8k_from_a_folder():
    folder = os.environ["SUS_GSM8K"]
    assert len(data.load(folder, "train", 0)) == 7473 and len(data.load(folder, "test", 0)) == 1319
    for line in (Path(folder) / "test.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert data.make_question(record, "here").judge(record["answer"]) == 1


def test_gsm8k_through_datasets(monkeypatch):
    """The hub's rows, as `datasets` gives them; and one line when it cannot."""
    import datasets
    rows = [{"question": "Two and two?", "answer": "It is <<2+2=4>>4.\n#### 4"}, {"question": "Big?", "answer": "#### 1,200"}]

    def load_dataset(name, config, split):
        assert (name, config) == ("openai/gsm8k", "main")
        if split == "test":
            raise ConnectionError("no network")
        return datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = data.load("gsm8k", "train", 0)
    assert sorted((problem.question, problem.answer) for problem in found) == [("Big?", 1200), ("Two and two?", 4)]
    with pytest.raises(ValueError, match="gsm8k cannot be had.*ConnectionError"):
        data.load("gsm8k", "test", 10)
    with pytest.raises(ValueError, match="no validation split"):
        data.load("gsm8k", "validation", 10)
