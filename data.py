"""Problems: each shows itself as a prompt and judges a response.

A problem is any object with
    prompt: str                           what the model reads; without a chat template, as it stands
    judge(response) -> float              1.0 for a correct response, else 0.0
and, where it has them,
    question, instruction: str            what a chat model is asked, and how it should answer
    valid(response) -> bool               is it a legal attempt, right or wrong?
    strategy_of(response) -> str | None   the true strategy, for measurement only: no reward of SuS sees it
    path_of(response) -> str | None       the same, told apart more finely

Countdown is built in: combine every given number once, with + - *, to reach a target.
    use 3,8,5 to make 19:   ->   8*3=24;24-5=19
It has several ways to solve most problems and a checker that knows them, so one can watch a policy lose its
strategies. Word problems come from GSM8K or from JSONL files with a question and an answer a line, and are judged by
the number that the response ends on (answers.py). A response is only ever parsed, never evaluated.
"""
import hashlib
import json
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from answers import answer_of

OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
# At most five digits a number, none of them a leading zero: no step is longer than 17 characters.
STEP = re.compile(r"(0|[1-9][0-9]{0,4})([-+*])(0|[1-9][0-9]{0,4})=(0|[1-9][0-9]{0,4})")
LARGEST_NUMBER, LARGEST_RESULT = 15, 99
SPLITS = ("test", "validation", *["train"] * 6)             # a problem's place in this list is decided by its hash


@dataclass(frozen=True)
class Countdown:
    numbers: tuple[int, ...]
    target: int
    instruction = "Use each number once, with + - *. Write only the steps, like this: 8*3=24;24-5=19"

    @cached_property
    def prompt(self) -> str:
        return f"use {','.join(map(str, self.numbers))} to make {self.target}:"

    def play(self, response: str) -> tuple[str, str, int] | None:
        """Parse a response -> (operators in order, the numbers that meet first, the result), None if illegal.

        Legal: one step fewer than there are numbers, each `a+b=c`, joined by `;`; the arithmetic is right; each
        a and b is a number still on the table, which the step takes away, putting its result there instead.
        """
        if len(response) > 20 * len(self.numbers):          # longer than any legal play: no work for hostile text
            return None
        steps = [STEP.fullmatch(step) for step in response.split(";")]
        if len(steps) != len(self.numbers) - 1 or None in steps:
            return None
        table, operators, first = list(self.numbers), "", ""
        for step in steps:
            a, operator, b, result = int(step[1]), step[2], int(step[3]), int(step[4])
            for number in (a, b):
                if number not in table:
                    return None
                table.remove(number)
            if OPERATORS[operator](a, b) != result:
                return None
            table.append(result)
            operators += operator
            first = first or ",".join(str(sorted(self.numbers).index(n) + 1) for n in sorted((a, b)))
        return operators, first, result

    def judge(self, response: str) -> float:
        played = self.play(response)
        return float(played is not None and played[2] == self.target)

    def valid(self, response: str) -> bool:
        return self.play(response) is not None

    def strategy_of(self, response: str) -> str | None:
        """The operators in order, such as `*-`."""
        played = self.play(response)
        return played and played[0]

    def path_of(self, response: str) -> str | None:
        """The operators and the ranks, by size, of the two numbers that meet first, such as `*- 1,3`."""
        played = self.play(response)
        return played and f"{played[0]} {played[1]}"


def attempt(numbers: tuple[int, ...], rng: random.Random, operators: str = "+-*") -> tuple[str, int]:
    """A random legal play of these numbers, all operators and orders alike -> (response, result)."""
    while True:
        table, steps = list(numbers), []
        while len(table) > 1:
            a, b = (table.pop(rng.randrange(len(table))) for _ in range(2))
            operator = rng.choice(operators)
            result = OPERATORS[operator](a, b)
            steps.append(f"{a}{operator}{b}={result}")
            table.append(result)
            if not 0 <= result <= LARGEST_RESULT:
                break
        else:
            return ";".join(steps), result


def split_of(key: str) -> str:
    """Decided by what a problem says, so no problem is ever in two splits, whatever the seed."""
    return SPLITS[hashlib.sha256(key.encode()).digest()[0] % len(SPLITS)]


def random_problem(size: int, rng: random.Random) -> Countdown:
    """The target is where a random play that likes to add ends: adding all numbers solves one problem in three, more
    than any other strategy does, which tempts a policy to do nothing else."""
    numbers = tuple(rng.randint(1, LARGEST_NUMBER) for _ in range(size))
    return Countdown(numbers, attempt(numbers, rng, "+++--**")[1])


def countdown(split: str, count: int, seed: int, size: int = 3) -> list[Countdown]:
    """`count` problems of one split, all solvable. Common ones repeat in training; where policies are measured none
    does, until there are no more."""
    rng, problems, seen, missed = random.Random(f"countdown {split} {size} {seed}"), [], set(), 0
    while len(problems) < count:
        problem = random_problem(size, rng)
        key = f"{sorted(problem.numbers)} {problem.target}"                              # whatever their order
        if split_of(key) == split and key not in seen:
            problems.append(problem)
            missed = 0
            if split != "train":
                seen.add(key)
        elif (missed := missed + 1) == 10_000:                                           # there are no more: begin again
            seen.clear()
    return problems


@dataclass(frozen=True)
class Question:
    """A word problem whose answer is a number."""
    question: str
    answer: Fraction
    instruction = "Think step by step. End with #### and the answer as a number."

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\n{self.instruction}\nAnswer:"

    def judge(self, response: str) -> float:
        """A model without a chat template may go on to ask the next question: that is no part of its answer."""
        return float(answer_of(response.split("\nQuestion:")[0]) == self.answer)


def read_questions(file: Path) -> list[Question]:
    """A JSONL file with `question` and `answer` a line; an answer is a number or a solution that ends on one."""
    problems = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, line {number}: not valid JSON ({error})") from None
        problems.append(make_question(record, f"{file}, line {number}"))
    if not problems:
        raise ValueError(f"{file} holds no problem: expected a JSON object with question and answer on every line")
    return problems


def make_question(record: dict, where: str) -> Question:
    if not isinstance(record, dict) or not isinstance(question := record.get("question"), str) or not question.strip():
        raise ValueError(f"{where}: expected an object with a question, a text that is not empty")
    if any("\ud800" <= letter <= "\udfff" for letter in question):
        raise ValueError(f"{where}: its question holds half of a surrogate pair, which is no text")
    answer, value = record.get("answer"), None
    if isinstance(answer, str):
        value = answer_of(answer)
    elif isinstance(answer, (int, float)) and not isinstance(answer, bool) and abs(answer) < 1e100:       # not infinite either
        value = Fraction(str(answer))
    if value is None:
        raise ValueError(f"{where}: its answer is {str(answer)[:60]!r}, expected a number or a solution that ends on one; "
                         "other kinds of answer need a judge of their own (README)")
    return Question(question.strip(), value)


def questions(name: str, split: str) -> list[Question]:
    """All problems of one split: a file is divided by its questions' hashes, a folder by the words in its files' names."""
    path = Path(name)
    if name == "gsm8k":
        return hub_questions(split)
    if path.is_file():
        return [problem for problem in read_questions(path) if split_of(problem.question) == split]
    files = {file: set(re.split("[^a-z]+", file.stem.lower())) & set(SPLITS) for file in sorted(path.glob("*.jsonl"))}
    if twice := [file for file, splits in files.items() if len(splits) > 1]:
        raise ValueError(f"{twice[0]} names more than one split: expected train, validation or test")
    found = [problem for file, splits in files.items() if split in splits for problem in read_questions(file)]
    if not found:
        raise ValueError(f"{name} has no {split} split: expected a file such as {split}.jsonl in it")
    return found


def hub_questions(split: str) -> list[Question]:
    """GSM8K (Cobbe et al. 2021) through `datasets`."""
    if split == "validation":
        raise ValueError("gsm8k has no validation split: use test, or a folder with files of your own")
    try:
        import datasets                                     # slow to import, and needed for the hub only
    except ImportError:
        raise ValueError("--data gsm8k needs the package datasets: pip install datasets, or name a folder with train.jsonl "
                         "and test.jsonl") from None
    try:
        rows = datasets.load_dataset("openai/gsm8k", "main", split=split)
    except Exception as error:                              # the hub's client raises dozens of types
        raise ValueError(f"gsm8k cannot be had from the hub or its cache ({type(error).__name__}): check the connection, "
                         f"or name a folder with train.jsonl and test.jsonl") from None
    return [make_question(row, f"gsm8k {split}, row {number}") for number, row in enumerate(rows)]


COUNTDOWN = {"countdown": 3, "countdown4": 4}               # task: how many numbers
KNOWN = (*COUNTDOWN, "gsm8k")


def check(name: str) -> None:
    if name not in KNOWN and not (name and (Path(name).is_file() or Path(name).is_dir())):
        raise ValueError(f"--data {name}: expected {', '.join(KNOWN)}, or a JSONL file or folder with questions and answers")


def load(name: str, split: str, count: int, seed: int = 0) -> list:
    """At most `count` problems of a task's `train`, `validation` or `test` split, 0 for all that there are; the same
    ones for the same seed. Countdown never runs out."""
    check(name)
    if count < 1 and (count < 0 or name in COUNTDOWN):
        raise ValueError(f"{count} {split} problems were asked for: at least one is needed")
    if name in COUNTDOWN:
        return countdown(split, count, seed, COUNTDOWN[name])
    found = questions(name, split)
    if not found:
        raise ValueError(f"{name} is too small: none of its problems fell into the {split} split")
    random.Random(f"{split} {seed}").shuffle(found)
    return found[:count or None]
