"""`evaluate.py RUN --ask TEXT`: answers of the base model and of the trained one, side by side."""
import re
import textwrap
from collections import Counter
from contextlib import suppress
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import data
import lora
from support import parallel

KEEP_ASKING = "-"  # --ask without a text
WIDTH = 80  # of a terminal
MOST = 6  # different responses of each model
COUNTDOWN = re.compile("use ([0-9]{1,4}(?:, ?[0-9]{1,4}){1,3}) to make ([0-9]{1,5}) ?:?", re.I)
EXAMPLE = "use 2,15,2 to make 11:"


def find_problem(task: str, text: str) -> tuple:
    """-> the problem that a text puts, and whether its answer is known."""
    text = text.strip()
    if task in data.COUNTDOWN:
        found = COUNTDOWN.fullmatch(text)
        if not found:
            raise ValueError(f"{text[:60]!r} is no such problem: expected two to four numbers, as "
                             f'in "{EXAMPLE}"')
        numbers = tuple(map(int, found[1].split(",")))
        return data.Countdown(numbers, int(found[2]), data.COUNTDOWN[task]), True
    for split in ("test", "train", "validation"):
        with suppress(ValueError):  # a task may lack a split
            for problem in data.load(task, split):
                if text in (problem.prompt, getattr(problem, "question", None)):
                    return problem, True
    if task == "gsm8k" or Path(task).exists():
        return data.Question(text, Fraction(0)), False
    return SimpleNamespace(prompt=text, judge=lambda response: 0.0), False


def make_column(title: str, responses: list[dict], known: bool, clusters: bool,
                width: int) -> list[str]:
    """The commonest responses, right ones first: how often, right or wrong, which strategy."""
    right = sum(each["correct"] for each in responses)
    lines = [f"{title}: {right:.0f} of {len(responses)} right" if known else title, ""]
    counts = Counter(each["text"] for each in responses)
    different = list({each["text"]: each for each in reversed(responses)}.values())
    different.sort(key=lambda each: (known and -each["correct"], -counts[each["text"]]))
    for each in different[:MOST]:
        words = f"{counts[each['text']]:2}x "
        if known:
            is_illegal = "strategy" in each and each["strategy"] is None
            words += f"{'right' if each['correct'] else 'illegal' if is_illegal else 'wrong':7} "
        if "strategy" in each:
            words += f"{each['strategy'] or '':5} "
        elif clusters:
            words += f"cluster {each['cluster']}: "
        shown = "".join(letter if letter.isprintable() else " " for letter in each["text"])
        lines += textwrap.wrap(f"{words} {shown.strip()}", width, subsequent_indent="    ",
                               drop_whitespace=False)
    if len(different) > MOST:
        lines.append(f"    and {len(different) - MOST} more")
    return lines


def make_page(text: str, answers: dict[str, list[dict]], known: bool, clusters: bool) -> str:
    """{title: responses} of one or two models -> what the terminal shows."""
    width = WIDTH // len(answers) - 2
    columns = [make_column(title, responses, known, clusters, width)
               for title, responses in answers.items()]
    rows = ["  ".join(cell.ljust(width) for cell in row).rstrip()
            for row in zip_longest(*columns, fillvalue="")]
    return "\n".join([*textwrap.wrap(text, WIDTH), "", *rows])


def answer(problem, policy, clustering, step: int, evaluate, seed: int) -> dict[str, list[dict]]:
    """Responses to one problem: of a run's base model and of the trained one, or of a model."""
    def respond() -> list[dict]:
        found = evaluate(policy, [problem], policy.config, clustering, seed)
        return found.records[0]["responses"]

    if not step:
        return {"the model": respond()}
    with lora.disabled(policy.model):
        before = respond()
    return {"base model": before, f"after {step} steps": respond()}


def talk(text: str, policy, clustering, step: int, evaluate, seed: int) -> None:
    """Print the answers to a text; without one, ask for texts until an empty line."""
    if parallel.world() > 1:
        raise ValueError("--ask talks to one process: start it with python, not with torchrun")
    keep_asking, task = text == KEEP_ASKING, policy.config.data
    while True:
        if keep_asking:
            try:
                example = f', such as "{EXAMPLE}"' if task in data.COUNTDOWN else ""
                text = input(f"\nyour problem{example} (an empty line stops)\n> ")
            except EOFError:
                text = ""
            if not text.strip():
                return
        try:
            problem, known = find_problem(task, text)
            answers = answer(problem, policy, clustering, step, evaluate, seed)
            if not getattr(problem, "strategies", True):
                text = f"{text.strip()} (it has no solution)"
            print("\n" + make_page(text.strip(), answers, known, clustering is not None))
        except ValueError as error:
            if not keep_asking:
                raise
            print(f"error: {error}")
        if not keep_asking:
            return
