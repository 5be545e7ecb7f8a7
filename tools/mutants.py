"""Would a test notice? Breaks a file in one place at a time and runs its tests.

    python tools/mutants.py grpo.py tests/test_grpo.py
    python tools/mutants.py support/fast.py tests/support/test_fast.py --sample 20

One operator is swapped, one number raised by one, one condition negated, or one statement left out.
Each such file stands in a copy of the repository, where the tests run until one fails: then the
breakage is caught, as it is after a time-out. One that survives is a hole in the tests, or it
changes nothing that matters.
"""
import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
SECONDS = 900  # for the tests of one breakage
SWAPS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
         ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
         ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.And: ("and", "or"),
         ast.Or: ("or", "and")}


def find_breakages(text: str) -> Iterator[tuple[int, int, str]]:
    """-> (start, end, replacement) of each breakage, in UTF-8 bytes of the text."""
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]

    def place(node, end: bool = False) -> int:
        line, column = (node.end_lineno, node.end_col_offset) if end else (
            node.lineno, node.col_offset)
        return starts[line - 1] + column

    for node in ast.walk(ast.parse(text)):
        operator, left, right = None, None, None
        if isinstance(node, ast.BinOp):
            operator, left, right = node.op, node.left, node.right
        elif isinstance(node, ast.Compare):
            operator, left, right = node.ops[0], node.left, node.comparators[0]
        elif isinstance(node, ast.BoolOp):
            operator, left, right = node.op, *node.values[:2]
        if type(operator) in SWAPS:
            old, new = (word.encode() for word in SWAPS[type(operator)])
            between = text.encode()[place(left, end=True):place(right)]
            start = place(left, end=True) + between.index(old)
            yield start, start + len(old), new.decode()
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield place(node), place(node, end=True), repr(node.value + 1)
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            condition = ast.get_source_segment(text, node.test)
            yield place(node.test), place(node.test, end=True), f"(not ({condition}))"
        is_call = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        if is_call or isinstance(node, ast.AugAssign):
            yield place(node), place(node, end=True), "pass"


def break_text(text: str, start: int, end: int, replacement: str) -> str:
    data = text.encode()
    return (data[:start] + replacement.encode() + data[end:]).decode()


def tests_pass(file: str, text: str, tests: list[str], cache: str) -> bool:
    """Run the tests in a copy of the repository where the file holds this text."""
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "cache*", "figures")
        shutil.copytree(ROOT, copy, ignore=ignored)
        (copy / file).write_text(text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider",
                   "--basetemp", f"{folder}/temporary", *tests]
        settings = {**os.environ, "SUS_TEST_CACHE": cache, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=copy, env=settings, timeout=SECONDS,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the file to break, from the repository's root")
    parser.add_argument("tests", nargs="+", help="its tests")
    parser.add_argument("--sample", type=int, default=0, help="only so many, drawn at random")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="side by side")
    arguments = parser.parse_args(argv)
    if not (ROOT / arguments.file).is_file() or arguments.workers < 1:
        parser.error("expected a file of the repository, and one worker or more")
    text = (ROOT / arguments.file).read_text()
    breakages = sorted(find_breakages(text))
    if arguments.sample:
        random.Random(0).shuffle(breakages)
        breakages = sorted(breakages[:arguments.sample])
    # A broken data.py or model.py must not build a base model of its own.
    build = "from tests.conftest import build_cache; print(build_cache(steps=100).parent)"
    cache = subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, text=True,
                           stdout=subprocess.PIPE).stdout.split()[-1]
    if not tests_pass(arguments.file, text, arguments.tests, cache):
        sys.exit("error: these tests fail without any change")

    def survives(breakage: tuple[int, int, str]) -> bool:
        return tests_pass(arguments.file, break_text(text, *breakage), arguments.tests, cache)

    with ThreadPoolExecutor(arguments.workers) as workers:
        passed = list(tqdm(workers.map(survives, breakages), "breakages", len(breakages)))
    for start, end, replacement in (each for each, alive in zip(breakages, passed) if alive):
        before = text.encode()[:start].decode()
        line = text.splitlines()[before.count("\n")].strip()
        old = text.encode()[start:end].decode()
        print(f"survived: line {before.count(chr(10)) + 1}: {line}\n    {old}  ->  {replacement}")
    print(f"{passed.count(False)} of {len(passed)} caught")


if __name__ == "__main__":
    main()
