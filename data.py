"""Problems: each shows itself as a prompt and judges a response.

A problem is any object with
    prompt: str                           what the model reads
    judge(response) -> float              1.0 for a correct response, else 0.0
and, where a task can read it off,
    valid(response) -> bool               is it a legal attempt, right or wrong?
    strategy_of(response) -> str | None   the true strategy, for measurement only: no reward of SuS sees it
    path_of(response) -> str | None       the same, told apart more finely

Countdown is built in: combine every given number once, with + - *, to reach a target.
    use 3,8,5 to make 19:   ->   8*3=24;24-5=19
It has several ways to solve most problems and a checker that knows them, so one can watch a policy lose its
strategies. A response is only ever parsed, never evaluated.
"""
import hashlib
import random
import re
from dataclasses import dataclass
from functools import cached_property

OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
# At most five digits a number, none of them a leading zero: no step is longer than 17 characters.
STEP = re.compile(r"(0|[1-9][0-9]{0,4})([-+*])(0|[1-9][0-9]{0,4})=(0|[1-9][0-9]{0,4})")
LARGEST_NUMBER, LARGEST_RESULT = 15, 99
SPLITS = ("test", "validation", *["train"] * 6)             # a problem's place in this list is decided by its hash


@dataclass(frozen=True)
class Countdown:
    numbers: tuple[int, ...]
    target: int

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


def split_of(problem: Countdown) -> str:
    """Decided by the problem itself, whatever the order of its numbers: no problem is ever in two splits."""
    key = f"{sorted(problem.numbers)} {problem.target}".encode()
    return SPLITS[hashlib.sha256(key).digest()[0] % len(SPLITS)]


def random_problem(size: int, rng: random.Random) -> Countdown:
    """The target is where a random play that likes to add ends: adding all numbers solves one problem in three, more
    than any other strategy does, which tempts a policy to do nothing else."""
    numbers = tuple(rng.randint(1, LARGEST_NUMBER) for _ in range(size))
    return Countdown(numbers, attempt(numbers, rng, "+++--**")[1])


def countdown(split: str, count: int, seed: int, size: int = 3) -> list[Countdown]:
    """`count` problems of one split, all solvable; common ones may repeat."""
    rng = random.Random(f"countdown {split} {size} {seed}")
    problems = []
    while len(problems) < count:
        problem = random_problem(size, rng)
        if split_of(problem) == split:
            problems.append(problem)
    return problems


COUNTDOWN = {"countdown": 3, "countdown4": 4}               # task: how many numbers


def load(name: str, split: str, count: int, seed: int = 0) -> list:
    """`count` problems of a task's `train`, `validation` or `test` split, the same ones for the same seed."""
    if name not in COUNTDOWN:
        raise ValueError(f"unknown data {name!r}: expected one of {', '.join(COUNTDOWN)}")
    if count < 1:
        raise ValueError(f"{count} {split} problems were asked for: at least one is needed")
    return countdown(split, count, seed, COUNTDOWN[name])
