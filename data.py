"""Problems: a prompt and a judge.

A problem is any object with
    prompt: str                           what the model reads, if it has no chat template
    judge(response) -> float              1.0 for a correct response, else 0.0
and, where it has them,
    question, instruction: str            what a chat model is asked, and how it should answer
    valid(response) -> bool               is it a legal attempt, right or wrong?
    strategy_of(response) -> str | None   the true strategy, for measurement (and the oracle) only
    strategies: set[str]                  every strategy that solves it, for measurement only

Countdown is built in: combine given numbers with + - * to reach a target, each of them once.
    use 3,8,5 to make 19:   ->   8*3=24;24-5=19
Each legal response shows its strategy, so one can watch a policy lose strategies: its operators in
order, or in countdown-calculations the calculation, whatever the order of its steps. All problems
of countdown-many and countdown-calculations can be solved in several ways, most of countdown's in
one. Word problems come from GSM8K or JSONL files and are judged by the number a response ends on
(support/answers.py). A task of your own is one function from a split to its problems:
`--data my_file:my_function`.
"""
import hashlib
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from support import parallel
from support.answers import find_answer, read_gsm8k, read_split
from support.calculation import OPERATORS, Step, calculation_of, solve
from support.config import import_function

# At most five digits per number, none a leading zero: no step is longer than 17 characters.
DIGITS = "(0|[1-9][0-9]{0,4})"
STEP = re.compile(f"{DIGITS}([-+*]){DIGITS}={DIGITS}")
LARGEST_RESULT = 99
SPLITS = ("test", "validation", *["train"] * 6)  # a problem's hash decides its place in this list
COUNTDOWN_TRAINING = 3000  # training problems


@dataclass(frozen=True)
class Rules:
    """What the problems of one Countdown task are like."""
    count: int  # how many numbers a problem has
    smallest: int = 1
    largest: int = 15
    use_all: bool = True  # must a response use every number?
    solutions: int = 1  # at least so many different ones each problem has
    calculations: bool = False  # is a strategy a calculation, or its operators in order?

    def allow(self, problem: "Countdown") -> bool:
        if self.solutions == 1:
            return True
        if self.calculations:
            # With target 0 the last step, x-x, does not tell a calculation from its negative.
            return problem.target > 0 and len(problem.strategies) >= self.solutions
        different = {"".join(sorted(operators)) for operators in problem.strategies}
        return len(different) >= self.solutions


COUNTDOWN = {
    "countdown": Rules(3), "countdown4": Rules(4), "countdown-many": Rules(3, solutions=2),
    "countdown-calculations": Rules(3, 2, 30, use_all=False, solutions=2, calculations=True)}


@dataclass(frozen=True)
class Countdown:
    numbers: tuple[int, ...]
    target: int
    rules: Rules = COUNTDOWN["countdown"]

    @property
    def instruction(self) -> str:
        once = "once" if self.rules.use_all else "at most once"
        return (f"Use each number {once}, with + - *. Write only the steps, like this: "
                "8*3=24;24-5=19")

    @cached_property
    def prompt(self) -> str:
        return f"use {','.join(map(str, self.numbers))} to make {self.target}:"

    def play(self, response: str) -> list[Step] | None:
        """Parse a response -> its steps, None if it is illegal.

        Legal: steps `a+b=c`, joined by `;`, one fewer than there are numbers, or any number up to
        that if not all must be used; the arithmetic is right; each a and b is on the table: the
        step takes them away and puts its result there. The last step's result counts.
        """
        if len(response) > 20 * len(self.numbers):  # longer than any legal play
            return None
        matches = [STEP.fullmatch(step) for step in response.split(";")]
        if None in matches or (self.rules.use_all and len(matches) < len(self.numbers) - 1):
            return None
        steps = [(int(a), operator, int(b), int(c)) for a, operator, b, c in
                 (match.groups() for match in matches)]
        table = list(self.numbers)
        for a, operator, b, result in steps:
            for number in (a, b):
                if number not in table:
                    return None
                table.remove(number)
            if OPERATORS[operator](a, b) != result:
                return None
            table.append(result)
        return steps

    def judge(self, response: str) -> float:
        steps = self.play(response)
        return float(steps is not None and steps[-1][3] == self.target)

    def valid(self, response: str) -> bool:
        return self.play(response) is not None

    def strategy_of(self, response: str) -> str | None:
        """The operators in order, such as `*-`, or the calculation, such as `ac-b` (Rules)."""
        steps = self.play(response)
        if steps is None:
            return None
        if self.rules.calculations:
            return calculation_of(self.numbers, steps)
        return "".join(operator for _, operator, *_ in steps)

    @cached_property
    def strategies(self) -> set[str]:
        """Every strategy that solves this problem."""
        plays = solve(tuple(sorted(self.numbers)), self.rules.use_all).get(self.target, set())
        return {calculation if self.rules.calculations else operators
                for operators, calculation in plays}


def random_play(numbers: tuple[int, ...], rng: random.Random, operators: str = "+-*",
                use_all: bool = True) -> tuple[str, int]:
    """A random legal play of these numbers, or of some of them -> (response, result)."""
    while True:
        table, steps = list(numbers), []
        if not use_all:
            table = rng.sample(table, rng.randint(2, len(numbers)))
        while len(table) > 1 and 0 <= table[-1] <= LARGEST_RESULT:
            a = table.pop(rng.randrange(len(table)))
            b = table.pop(rng.randrange(len(table)))
            operator = rng.choice(operators)
            table.append(OPERATORS[operator](a, b))
            steps.append(f"{a}{operator}{b}={table[-1]}")
        if 0 <= table[-1] <= LARGEST_RESULT:
            return ";".join(steps), table[-1]


def random_problem(rules: Rules, rng: random.Random) -> Countdown:
    """The target is where a random play that prefers + ends.

    Adding all numbers solves one training problem of countdown in three, more than any other
    strategy does, which tempts a policy to do nothing else.
    """
    numbers = tuple(rng.randint(rules.smallest, rules.largest) for _ in range(rules.count))
    _, target = random_play(numbers, rng, "+++--**", rules.use_all)
    return Countdown(numbers, target, rules)


def split_of(key: str) -> str:
    """Decided by what a problem says, so no problem is ever in two splits, whatever the seed."""
    return SPLITS[hashlib.sha256(key.encode()).digest()[0] % len(SPLITS)]


def countdown(split: str, count: int, seed: int, rules: Rules) -> list[Countdown]:
    """Solvable problems of one split. In training, and in test-drawn, common ones repeat; elsewhere
    all are different, and there are only as many as 10,000 draws in a row can find."""
    rng = random.Random(f"countdown {split} {rules.count} {seed}")
    problems, seen, misses = [], set(), 0
    while len(problems) < (count or COUNTDOWN_TRAINING) and misses < 10_000:
        problem = random_problem(rules, rng)
        key = f"{sorted(problem.numbers)} {problem.target}"  # the same in any order
        if not rules.allow(problem):
            continue
        misses += 1
        if split_of(key) != split.removesuffix("-drawn") or key in seen:
            continue
        problems.append(problem)
        misses = 0
        if split in ("validation", "test"):
            seen.add(key)
    return problems


@dataclass(frozen=True)
class Question:
    """A word problem whose answer is a number."""
    question: str
    answer: Fraction
    instruction = "Think step by step. End with #### and the answer as a number."

    @property
    def prompt(self) -> str:
        return f"{self.instruction}\nQuestion: {self.question}\nAnswer:"

    def judge(self, response: str) -> float:
        """A model without a chat template may go on to the next question, which does not count."""
        return float(find_answer(response.split("\nQuestion:")[0]) == self.answer)


def find_task(name: str):
    """-> a function from a split to its problems. No file is read yet."""
    if name == "gsm8k":
        return lambda split: [Question(*pair) for pair in read_gsm8k(split)]
    if name and Path(name).exists():
        return lambda split: [Question(*pair) for pair in read_split(Path(name), split, split_of)]
    if "/" in name or name.endswith(".jsonl"):
        raise ValueError(f"--data {name}: there is no such file or folder; if it has moved, edit "
                         "its path in the run's config.json")
    return import_function("--data", name, f"{', '.join(COUNTDOWN)}, gsm8k, a JSONL file or "
                           "folder with questions and answers")


def load(name: str, split: str, count: int = 0, seed: int = 0) -> list:
    """At most `count` problems of a task's train, validation or test split, 0 for all (of
    Countdown's endless training problems 3,000); the same ones for the same seed."""
    if name in COUNTDOWN:
        problems = countdown(split, count, seed, COUNTDOWN[name])
    else:
        split = split.removesuffix("-drawn")
        problems = list(find_task(name)(split) or [])
        random.Random(f"{split} {seed}").shuffle(problems)
    if not problems:
        raise ValueError(f"{name} has no {split} problems: a folder needs a file {split}.jsonl, a "
                         "single file is divided by a hash of its questions")
    if not all(isinstance(getattr(problem, "prompt", None), str) and hasattr(problem, "judge")
               for problem in problems):
        raise ValueError(f"--data {name}: each problem needs a prompt, which is a text, and a "
                         "judge")
    if len(problems) < count:
        parallel.say(f"note: {name} has {len(problems)} {split} problems, not {count}")
    return problems[:count or None]
