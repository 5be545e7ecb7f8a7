"""The calculation behind a play of Countdown, whatever the order of its steps; a solver.

A play takes two numbers from the table and puts their result there, step by step. With letters for
the given numbers, from the smallest to the largest, each number on the table is a polynomial,
multiplied out: (b + c) * a and c * a + a * b are both ab + ac. Two plays are the same calculation
if their polynomials are equal, so that they give the same result whatever the numbers are; 2 + 2
and 2 * 2 are two. Where equal numbers lie on the table, a text does not tell which one it takes:
it is a given one before a computed one, and of computed ones the first.
"""
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from string import ascii_lowercase

OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
Calculation = tuple[tuple[str, int], ...]  # (letters of a product, how often it is added)
Step = tuple[int, str, int, int]  # (a, operator, b, result)
Table = tuple[tuple[int, Calculation], ...]  # numbers to play with, and where they come from


def first_table(numbers: tuple[int, ...]) -> Table:
    """The given numbers; equal ones have the same letter."""
    letters = dict(zip(sorted(set(numbers)), ascii_lowercase))
    return tuple((number, ((letters[number], 1),)) for number in sorted(numbers))


def take(table: Table, number: int) -> tuple[Calculation, Table]:
    """The first entry with this number, and the rest of the table."""
    place = [value for value, _ in table].index(number)
    return table[place][1], table[:place] + table[place + 1:]


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


def write(calculation: Calculation) -> str:
    """`ab-2c` for a * b - c - c; 0 for a - a. What is added comes first, since + sorts before -."""
    terms = [f"{'-' if count < 0 else '+'}{abs(count) if abs(count) > 1 else ''}{letters}"
             for letters, count in calculation]
    return "".join(sorted(terms)).removeprefix("+") or "0"


def play_step(table: Table, a: int, operator: str, b: int) -> Table:
    """Take a and b from the table and put their result there."""
    x, rest = take(table, a)
    y, rest = take(rest, b)
    return (*rest, (OPERATORS[operator](a, b), combine(x, operator, y)))


def calculation_of(numbers: tuple[int, ...], steps: list[Step]) -> str:
    """What the steps of a legal play calculate."""
    table = first_table(numbers)
    for a, operator, b, _ in steps:
        table = play_step(table, a, operator, b)
    return write(table[-1][1])


def next_tables(table: Table) -> Iterator[tuple[str, Table]]:
    """After every step, with its operator. a >= b is enough: a + b is b + a, and a - b may not be
    negative."""
    numbers = sorted((number for number, _ in table), reverse=True)
    for a, b in combinations(numbers, 2):
        for operator in OPERATORS:
            yield operator, play_step(table, a, operator, b)


@cache
def solve(numbers: tuple[int, ...], use_all: bool) -> dict[int, set[tuple[str, str]]]:
    """All legal plays of these numbers, or of some -> {result: {(operators, calculation)}}."""
    tables, plays = {("", first_table(numbers))}, {}
    for step in range(1, len(numbers)):
        tables = {(operators + operator, after) for operators, table in tables
                  for operator, after in next_tables(table)}
        if step == len(numbers) - 1 or not use_all:
            for operators, (*_, (result, calculation)) in tables:
                plays.setdefault(result, set()).add((operators, write(calculation)))
    return plays
