"""Countdown: the judge by hand and by brute force, splits that cannot meet; question files."""
import dataclasses
import itertools
import json
import os
import random
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from data import Countdown, Question, Rules
from support import answers

PROBLEM = Countdown((3, 8, 5), 19)
CALCULATIONS = data.COUNTDOWN["countdown-calculations"]
GSM8K = os.environ.get("SUS_GSM8K")
NO_GSM8K = "SUS_GSM8K does not name a folder with GSM8K's train.jsonl and test.jsonl"


def key_of(problem: Countdown) -> tuple:
    """Problems with the same numbers in another order are the same problem."""
    return tuple(sorted(problem.numbers)), problem.target


def test_the_prompt():
    assert PROBLEM.prompt == "use 3,8,5 to make 19:"


@pytest.mark.parametrize("response, right", [
    ("8*3=24;24-5=19", True), ("3*8=24;24-5=19", True), ("3+8=11;5+11=16", False)])
def test_legal_plays(response, right):
    assert PROBLEM.valid(response) is True
    assert PROBLEM.judge(response) == float(right)
    assert PROBLEM.strategy_of(response) is not None


@pytest.mark.parametrize("response", [
    "8*3=24", "8*3=24;24-5=19;", ";8*3=24;24-5=19",
    "8*3=25;25-5=20",  # wrong arithmetic
    "8*3=24;24-4=20",  # a number nobody gave
    "8*8=64;64-5=59",  # a number used twice
    "8*3=24;8-5=3",  # the same, later
    "5-8=-3;-3+3=0",  # negative numbers are not on the table
    "08*3=24;24-5=19", "8*3=24;24-5=19 ", "8*3=24;24-5=19\n", "8 * 3 = 24;24-5=19",
    "8*3=24,24-5=19", "8/3=2;2-5=3", "\u0668*\u0663=24;24-5=19", "", "19",
    "use 3,8,5 to make 19:8*3=24;24-5=19",  # the prompt's numbers never count as an answer
    "__import__('os')", "8**3=512;512-5=507"])
def test_illegal_plays(response):
    assert PROBLEM.valid(response) is False
    assert PROBLEM.judge(response) == 0.0
    assert PROBLEM.strategy_of(response) is None


def test_strategies_by_hand():
    assert PROBLEM.strategy_of("8*3=24;24-5=19") == "*-"
    assert PROBLEM.strategy_of("5+3=8;8-8=0") == "+-"  # either 8 may be meant
    four = Countdown((1, 2, 3, 4), 10)
    assert four.strategy_of("1+2=3;3+3=6;6+4=10") == "+++"
    assert four.judge("1+2=3;3+3=6;6+4=10") == 1
    assert four.judge("1+2=3;3*4=12;12-3=9") == 0
    assert Countdown((2, 2, 5), 9).judge("2+2=4;4+5=9") == 1
    assert not Countdown((2, 3, 5), 9).valid("2+2=4;4+5=9")


def test_calculations_by_hand():
    problem = Countdown((3, 8, 5), 19, CALCULATIONS)  # 3, 5 and 8 are a, b and c
    assert problem.strategy_of("8*3=24;24-5=19") == "ac-b"
    assert problem.strategy_of("3*8=24;24-5=19") == "ac-b"
    assert problem.strategy_of("5+3=8;8-8=0") == "c-a-b"  # the given 8 comes first
    assert problem.strategy_of("8-5=3;3*3=9") == "ac-ab"  # multiplied out
    twos = Countdown((2, 15, 2), 11, CALCULATIONS)
    assert twos.strategy_of("15-2=13;13-2=11") == twos.strategy_of("2+2=4;15-4=11") == "b-2a"
    assert twos.strategy_of("2*2=4;15-4=11") == "b-aa"
    assert Countdown((5, 5, 7), 0, CALCULATIONS).strategy_of("5-5=0;7*0=0") == "0"
    assert problem.strategy_of("8*3=25;25-5=20") is None


def plays(numbers):
    """Every legal play by brute force -> (its steps, its result)."""
    if len(numbers) == 1:
        yield [], numbers[0]
        return
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
        for sign, result in (("+", a + b), ("-", a - b), ("*", a * b)):
            if result < 0:
                continue
            for steps, last in plays(rest + [result]):
                yield [f"{a}{sign}{b}={result}", *steps], last


def all_responses(problem: Countdown) -> dict[str, int]:
    """Every legal response by brute force, and its result; without steps that lead nowhere."""
    responses = {}
    longest = len(problem.numbers)
    sizes = [longest] if problem.rules.use_all else range(2, longest + 1)
    for size in sizes:
        for numbers in itertools.combinations(problem.numbers, size):
            responses |= {";".join(steps): result for steps, result in plays(list(numbers))}
    return responses


@pytest.mark.parametrize("task, count", [("countdown", 40), ("countdown4", 4)])
def test_the_judge_agrees_with_brute_force(task, count):
    for problem in data.load(task, "test", count):
        for use_all in (True, False):
            variant = dataclasses.replace(problem, rules=Rules(3, use_all=use_all))
            legal = all_responses(variant)
            assert problem.target in legal.values()  # every problem can be solved
            for response, result in legal.items():
                assert variant.valid(response)
                assert variant.judge(response) == (result == problem.target)
                assert variant.valid(response.partition(";")[0]) is not use_all


def with_other_numbers(response: str, others: dict[int, int]) -> int | None:
    """The result of a play whose given numbers are all different, with others in their places."""
    table = dict(others)
    for step in response.split(";"):
        a, sign, b, result = re.fullmatch(r"(\d+)(\D)(\d+)=(\d+)", step).groups()
        a, b = table.pop(int(a)), table.pop(int(b))
        if int(result) in table:
            return None  # no way to tell from the text which of the two is meant later
        table[int(result)] = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return table[int(result)]


def test_plays_are_the_same_calculation_if_they_agree_whatever_the_numbers_are():
    problems = [problem for problem in data.load("countdown-calculations", "test", 80)
                if len(set(problem.numbers)) == 3]
    for problem in problems[:40]:
        others = [{number: random.Random(f"{number} {draw}").randrange(10 ** 6)
                   for number in problem.numbers} for draw in range(2)]
        results = {}
        for response in all_responses(problem):
            values = tuple(with_other_numbers(response, each) for each in others)
            if None not in values:
                results.setdefault(problem.strategy_of(response), set()).add(values)
        assert all(len(values) == 1 for values in results.values())
        assert len(set.union(*results.values())) == len(results) > 10


@pytest.mark.parametrize("task, count", [("countdown", 60), ("countdown4", 4),
                                         ("countdown-many", 60), ("countdown-calculations", 60)])
def test_the_solver_finds_every_strategy(task, count):
    for problem in data.load(task, "test", count):
        expected = {problem.strategy_of(response)
                    for response, result in all_responses(problem).items()
                    if result == problem.target}
        assert problem.strategies == expected
        assert expected


def test_problems_of_many_kinds_have_solutions_that_are_no_mere_reorderings():
    problems = data.load("countdown-many", "validation", 40)
    for problem in problems:
        assert len(problem.numbers) == 3
        assert len({"".join(sorted(way)) for way in problem.strategies}) >= 2
    keys = {key_of(problem) for problem in problems}
    assert not keys & {key_of(problem) for problem in data.load("countdown-many", "train", 500)}


def test_problems_of_several_calculations_need_not_use_every_number():
    for problem in data.load("countdown-calculations", "validation"):
        assert len(problem.numbers) == 3
        assert not problem.rules.use_all
        assert problem.target > 0
        assert len(problem.strategies) >= 2
    one, two, three = "13-2=11", "2+2=4;15-4=11", "2+2=4;15-4=11;11*9=99"
    problem = Countdown((2, 15, 2, 13), 11, CALCULATIONS)
    assert problem.strategies == {"b-a", "c-2a", "c-aa", "ab-c"}
    assert [problem.judge(play) for play in (one, two, three, "", "13-2=11;")] == [1, 1, 0, 0, 0]
    assert "at most once" in problem.instruction
    assert "at most" not in PROBLEM.instruction


def test_drawn_test_problems_repeat_like_training_problems_and_are_test_problems():
    once, drawn, train = (data.load("countdown", split, 1500)
                          for split in ("test", "test-drawn", "train"))
    new = {key_of(problem) for problem in drawn} - {key_of(problem) for problem in once}
    assert len(new) < 10  # of those that 10,000 draws in a row did not find
    assert not new & {key_of(problem) for problem in train}
    assert len({key_of(problem) for problem in drawn}) < 0.5 * len(drawn)

    def share_of_sums(problems):
        return sum(sum(problem.numbers) == problem.target for problem in problems) / len(problems)
    assert abs(share_of_sums(drawn) - share_of_sums(train)) < 0.05
    assert share_of_sums(once) < share_of_sums(train) - 0.05


@pytest.mark.parametrize("task", data.COUNTDOWN)
def test_random_plays_are_legal_and_use_all_numbers_or_some(task):
    rng, rules, drawn, operators, lengths = random.Random(0), data.COUNTDOWN[task], [], set(), set()
    for _ in range(2000):
        problem = data.random_problem(rules, rng)
        numbers = problem.numbers
        drawn += numbers
        assert problem.rules == rules
        response, result = data.random_play(numbers, rng, use_all=rules.use_all)
        assert Countdown(numbers, result, rules).judge(response) == 1
        assert result <= data.LARGEST_RESULT
        operators.add("".join(sign for sign in response if sign in "+-*"))
        lengths.add(response.count(";") + 1)
    assert (min(drawn), max(drawn)) == (rules.smallest, rules.largest)
    longest = rules.count - 1
    assert lengths == ({longest} if rules.use_all else set(range(1, longest + 1)))
    assert len(operators) == sum(3 ** length for length in lengths)


def test_splits_are_disjoint_whatever_the_seed():
    keys = {}
    for split, count in (("train", 2000), ("validation", 200), ("test", 200)):
        keys[split] = {key_of(problem) for seed in range(3)
                       for problem in data.load("countdown", split, count, seed)}
    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["validation"]
    assert not keys["validation"] & keys["test"]


def test_the_seed_decides_the_problems():
    seven = data.load("countdown4", "train", 50, 7)
    assert seven == data.load("countdown4", "train", 50, 7)
    assert seven != data.load("countdown4", "train", 50, 8)
    assert {len(problem.numbers) for problem in seven} == {4}
    assert {len(problem.numbers) for problem in data.load("countdown", "train", 50)} == {3}


@pytest.mark.parametrize("split, count, low, high", [
    ("train", 1000, 0.28, 0.38), ("test", 200, 0.2, 0.28)])
def test_adding_solves_one_problem_in_three_and_one_in_four_where_none_repeats(
        split, count, low, high):
    problems = data.load("countdown", split, count)
    assert len(problems) == count
    assert low < sum(sum(each.numbers) == each.target for each in problems) / count < high


def test_there_are_three_thousand_training_problems_unless_asked_for_more():
    problems = data.load("countdown", "train")
    assert len(problems) == 3000
    assert problems[:20] == data.load("countdown", "train", 20)
    assert len({key_of(problem) for problem in problems}) < 3000  # common ones repeat


@pytest.mark.parametrize("split", ["test", "validation"])
def test_no_problem_is_measured_twice(split):
    assert len({key_of(problem) for problem in data.load("countdown", split, 200)}) == 200


def test_a_split_ends_when_all_of_its_problems_are_found(capsys):
    everything = data.load("countdown", "test", 10 ** 9)  # more than there are
    assert f"countdown has {len(everything)} test problems" in capsys.readouterr().err
    keys = {key_of(problem) for problem in everything}
    assert len(keys) == len(everything)
    assert 800 < len(everything) < 1100
    assert everything[:200] == data.load("countdown", "test", 200)
    all_of_another_seed = {key_of(problem) for problem in data.load("countdown", "test", 0, 5)}
    both = keys & all_of_another_seed
    assert len(both) > 0.97 * len(keys | all_of_another_seed)  # each finds nearly all there are


LEGAL = {";".join(steps): result for steps, result in plays(list(PROBLEM.numbers))}
OTHERS = [";".join(steps) for numbers in ([3, 8], [8, 8, 5]) for steps, _ in plays(numbers)]


def edit(play: str, place: int, letter: str, left_out: int) -> str:
    """Put a letter into a play, instead of so many of its own."""
    return play[:place] + letter + play[place + left_out:]


@settings(max_examples=300, deadline=None)
@given(st.text() | st.sampled_from(OTHERS)
       | st.builds(edit, st.sampled_from(sorted(LEGAL)), st.integers(0, 15),
                   st.sampled_from(["", *"0123456789+-*=; "]), st.integers(0, 2)))
def test_the_judge_takes_any_text_and_only_legal_plays_are_legal(response):
    """Many texts are a letter or two away from a legal play, and some still are one."""
    assert PROBLEM.valid(response) is (response in LEGAL)
    assert PROBLEM.judge(response) == (LEGAL.get(response) == 19)


@pytest.mark.parametrize("piece", ["9", ";", "8*3=24;", "(", "1+", "\0"])
def test_a_response_longer_than_any_legal_play_is_not_even_parsed(piece, monkeypatch):
    monkeypatch.setattr(data, "STEP", None)
    assert PROBLEM.judge(piece * 10 ** 6) == 0
    assert PROBLEM.valid(piece * 61) is False


def test_the_longest_plays_are_judged():
    problem = Countdown((10000, 20000, 30000), 60000)
    assert problem.judge("10000+20000=30000;30000+30000=60000") == 1


def write_lines(file: Path, *records) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def make_records(count: int) -> list[dict]:
    return [{"question": f"What is {n} + 1?", "answer": f"Add one.\n#### {n + 1:,}"}
            for n in range(count)]


def test_the_prompt_of_a_question_tells_how_to_answer():
    question = Question("What is 2 + 3?", Fraction(5))
    assert question.prompt == f"{Question.instruction}\nQuestion: What is 2 + 3?\nAnswer:"


def test_a_question_judges_the_number_that_a_response_ends_on():
    problem = Question("What is 17 + 1?", Fraction(18))
    assert problem.judge("so it is $18.") == 1
    assert problem.judge("18, no, 19") == 0
    assert problem.judge("no idea") == 0
    goes_on = "It is 18.\nQuestion: what is 2 + 2?\nAnswer: 4"  # the next question is its own
    assert problem.judge(goes_on) == 1
    assert problem.judge(goes_on.replace("18", "17").replace("4", "18")) == 0


def test_a_file_is_divided_by_its_questions(tmp_path):
    file = write_lines(tmp_path / "all.jsonl", *make_records(2000))
    splits = {split: data.load(file, split) for split in ("train", "validation", "test")}
    questions = {problem.question for problems in splits.values() for problem in problems}
    assert len(questions) == sum(map(len, splits.values())) == 2000
    assert 1350 < len(splits["train"]) < 1650
    assert len(data.load(file, "test", 7)) == 7
    shorter = write_lines(tmp_path / "shorter.jsonl", *make_records(1000))
    assert {each.question for each in data.load(shorter, "test")} <= {
        each.question for each in splits["test"]}  # a problem stays in its split


def test_the_seed_decides_the_order_of_questions(tmp_path):
    file = write_lines(tmp_path / "all.jsonl", *make_records(500))
    first = data.load(file, "train", 50, 1)
    assert first == data.load(file, "train", 50, 1)
    assert first != data.load(file, "train", 50, 2)
    assert set(data.load(file, "train", 0, 1)) == set(data.load(file, "train", 0, 2))


def test_a_folder_is_divided_by_the_names_of_its_files(tmp_path):
    records, folder = make_records(20), tmp_path / "folder"
    write_lines(folder / "train.jsonl", *records[3:10])
    with open(folder / "train.jsonl", "a") as file:
        file.write("\n")
    write_lines(folder / "test.jsonl", {"question": "half?", "answer": 0.5},
                {"question": "three?", "answer": 3})
    assert len(data.load(str(folder), "train", 100)) == 7
    test = data.load(str(folder), "test")
    assert {problem.answer for problem in test} == {Fraction(1, 2), Fraction(3)}
    write_lines(folder / "pretrain-latest.jsonl", *records[:3])  # other words name no split
    assert len(data.load(str(folder), "train", 100)) == 7
    write_lines(folder / "more-Train.jsonl", *records[10:12])
    assert len(data.load(str(folder), "train")) == 9
    with pytest.raises(ValueError, match="no validation problems"):
        data.load(str(folder), "validation", 5)
    write_lines(folder / "train-test.jsonl", *records[:3])
    with pytest.raises(ValueError, match="more than one split"):
        data.load(str(folder), "train")


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_question(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"question": "q ", "answer": "3"}\r\n')
    assert answers.read_pairs(file) == [("q", Fraction(3))]


@pytest.mark.parametrize("line, words", [
    ("{", "not valid JSON"),
    ("[]", "expected an object"),
    ('{"answer": "3"}', "question"),
    ('{"question": " ", "answer": "3"}', "question"),
    ('{"question": "\\ud800", "answer": "3"}', "surrogate"),
    ('{"question": "q"}', "answer is 'None'"),
    ('{"question": "q", "answer": "Paris"}', "'Paris'"),
    ('{"question": "q", "answer": true}', "True"),
    ('{"question": "q", "answer": [3]}', "[3]"),
    ('{"question": "q", "answer": 1e400}', "'inf'"),
    ("\udcff", "not valid JSON"),
    ("[" * 100000, "not valid JSON")])
def test_a_malformed_line_is_named(tmp_path, line, words):
    file = tmp_path / "q.jsonl"
    good = b'{"question": "q", "answer": "3"}\n'
    file.write_bytes(good + b"\n" + line.encode(errors="surrogateescape") + b"\n" + good)
    with pytest.raises(ValueError) as error:
        data.load(str(file), "train")
    assert f"{file}, line 3" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize("name, words", [
    ("chess", "expected countdown, countdown4, countdown-many, countdown-calculations, gsm8k, a"),
    ("missing.jsonl", "no such file"), ("./nowhere", "no such file"), ("", "expected countdown"),
    ("json:", "expected countdown"), ("/dev/null", "no train problems"),
    ("json:nothing", "cannot be imported"), ("no_such_module:f", "cannot be imported"),
    (":f", "cannot be imported")])
def test_what_cannot_be_loaded(name, words):
    with pytest.raises(ValueError, match=words):
        data.load(name, "train")


def test_empty_files_and_folders_have_no_problems(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for path in (tmp_path / "empty.jsonl", tmp_path):
        with pytest.raises(ValueError, match="has no train problems"):
            data.load(str(path), "train")


def test_a_task_of_your_own_is_one_function(tmp_path, monkeypatch):
    (tmp_path / "my_task_for_test.py").write_text(
        "from data import Countdown\n"
        "def games(split):\n"
        "    first = {'train': 1, 'test': 5}.get(split)\n"
        "    return first and [Countdown((first, n, 3), 9) for n in range(1, 9)] or []\n")
    monkeypatch.syspath_prepend(tmp_path)
    train = data.load("my_task_for_test:games", "train")
    assert sorted(problem.numbers for problem in train) == [(1, n, 3) for n in range(1, 9)]
    assert {each.numbers[0] for each in data.load("my_task_for_test:games", "test")} == {5}
    assert data.load("my_task_for_test:games", "train", 3) == train[:3]
    assert data.load("my_task_for_test:games", "train", seed=1) != train
    with pytest.raises(ValueError, match="my_task_for_test:games has no validation problems"):
        data.load("my_task_for_test:games", "validation")


@pytest.mark.skipif(not GSM8K, reason=NO_GSM8K)
def test_gsm8k_from_a_folder():
    assert len(data.load(GSM8K, "train")) == 7473
    assert len(data.load(GSM8K, "test")) == 1319
    for line in (Path(GSM8K) / "test.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert Question(*answers.read_pair(record, "here")).judge(record["answer"]) == 1


def test_gsm8k_through_datasets(monkeypatch):
    """The hub's rows, as `datasets` gives them; and one line when it cannot."""
    import datasets
    rows = [{"question": "Two and two?", "answer": "It is <<2+2=4>>4.\n#### 4"},
            {"question": "Big?", "answer": "#### 1,200"}]

    def load_dataset(name, config, split):
        assert (name, config) == ("openai/gsm8k", "main")
        if split == "test":
            raise ConnectionError("no network")
        return datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    problems = data.load("gsm8k", "train")
    assert sorted((each.question, each.answer) for each in problems) == [
        ("Big?", 1200), ("Two and two?", 4)]
    with pytest.raises(ValueError, match="gsm8k cannot be downloaded.*ConnectionError"):
        data.load("gsm8k", "test", 10)
    with pytest.raises(ValueError, match="no validation split"):
        data.load("gsm8k", "validation", 10)


class Lonely:
    """No problem: nobody judges it."""
    prompt = "?"


def lonely(split):
    return [Lonely()]


def numbered(split):
    return [SimpleNamespace(prompt=5, judge=None)]


def nothing(split):
    return None


@pytest.mark.parametrize("task, words", [("lonely", "a text, and a judge"),
                                         ("numbered", "a prompt, which is a text"),
                                         ("nothing", "no test problems")])
def test_a_task_of_ones_own_must_give_problems(task, words):
    with pytest.raises(ValueError, match=words):
        data.load(f"tests.test_data:{task}", "test")
