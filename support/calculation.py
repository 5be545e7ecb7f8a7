"""Countdown's strategies: the calculation behind a play, whatever the order of its steps.

A play takes two numbers from the table and puts their result there, until one is left. With letters
for the given numbers, from the smallest to the largest, each number on the table is a polynomial,
multiplied out: (b + c) * a and c * a + a * b are both ab + ac. Two plays are the same strategy if
their polynomials are equal, so that they give the same result whatever the numbers are.
"""
from collections import Counter
from functools import cache

OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
LETTERS = "abcd"
Calculation = tuple[tuple[str, int], ...]  # (letters of a product, how often it is added)
Table = tuple[tuple[int, Calculation], ...]  # numbers to play with, and where they come from


def first_table(numbers: tuple[int, ...]) -> Table:
    """The given numbers; equal ones have the same letter."""
    letters = dict(zip(sorted(set(numbers)), LETTERS))
    return tuple((number, ((letters[number], 1),)) for number in sorted(numbers))


def take(table: Table, number: int) -> tuple[Calculation, Table] | None:
    """The first entry with this number, and the rest of the table."""
    for place, (value, calculation) in enumerate(table):
        if value == number:
            return calculation, table[:place] + table[place + 1:]
    return None


def combine(x: Calculation, operator: str, y: Calculation) -> Calculation:
    """x + y, x - y or x * y, multiplied out."""
    if operator == "*":
        terms = [("".join(sorted(one + other)), i * j) for one, i in x for other, j in y]
    else:
        sign = 1 if operator == "+" else -1
        terms = [*x, *((letters, sign * count) for letters, count in y)]
    total = Counter()
    for letters, count in terms:
        total[letters] += count
    return tuple(sorted(term for term in total.items() if term[1]))


def name(calculation: Calculation) -> str:
    """`ab-2c` for a * b - c - c; 0 for a - a."""
    terms = [f"{'-' if count < 0 else '+'}{abs(count) if abs(count) > 1 else ''}{letters}"
             for letters, count in calculation]
    return "".join(sorted(terms)).removeprefix("+") or "0"


def play_step(table: Table, a: int, operator: str, b: int) -> Table | None:
    """Take a and b from the table and put their result there; None if that is illegal."""
    first = take(table, a)
    second = first and take(first[1], b)
    result = OPERATORS[operator](a, b)
    if second is None or result < 0:
        return None
    return (*second[1], (result, combine(first[0], operator, second[0])))


@cache
def solve(numbers: tuple[int, ...], use_all: bool) -> dict[int, set[str]]:
    """{result: the strategies that reach it} of all legal plays of these numbers, or of some."""
    tables, strategies = {first_table(numbers)}, {}
    for left in range(len(numbers) - 1, 0, -1):
        # Enough: a - b may not be negative, and a + b and a * b are b + a and b * a.
        found = (play_step(table, a, operator, b) for table in tables for a, _ in table
                 for b, _ in table if a >= b for operator in OPERATORS)
        tables = set(found) - {None}
        if left == 1 or not use_all:
            for *_, (result, calculation) in tables:
                strategies.setdefault(result, set()).add(name(calculation))
    return strategies
