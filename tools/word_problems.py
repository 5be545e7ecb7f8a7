"""Easy one-step word problems with numbers below 20, as JSONL: something a model of 135 million parameters can learn.

    python tools/word_problems.py problems.jsonl [HOW_MANY]

Every line has a question and its answer; the same command writes the same file. train.py splits it by a hash of the questions.
"""
import json
import random
import sys
from pathlib import Path

NAMES = "Ada Ben Cleo Dan Eva Finn Gina Hugo Ida Jon Kim Leo Mia Noah Olga Paul Rosa Sam Tina Vera".split()
THINGS = "apples books coins cards eggs flowers marbles pencils shells stamps stickers toys".split()
STORIES = [                                                 # text, answer
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?", lambda a, b: a + b),
    ("{name} has {a} {things} and {other} has {b}. How many {things} do they have together?", lambda a, b: a + b),
    ("There were {a} {things} on the table and {name} put {b} more there. How many are there now?", lambda a, b: a + b),
    ("{name} had {a} {things} and gave {b} of them to {other}. How many does {name} have left?", lambda a, b: a - b),
    ("{name} has {a} {things} and {other} has {b}. How many more {things} does {name} have than {other}?", lambda a, b: a - b),
    ("{name} needs {a} {things} and has {b}. How many {things} are still missing?", lambda a, b: a - b),
    ("{name} has {a} boxes with {b} {things} in each. How many {things} does {name} have?", lambda a, b: a * b),
    ("{name} finds {b} {things} a day. How many {things} does {name} find in {a} days?", lambda a, b: a * b),
]


def problems(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Different questions, no answer below zero."""
    draw, found = random.Random(seed), {}
    while len(found) < count:
        story, answer = draw.choice(STORIES)
        a, b = sorted((draw.randint(2, 19), draw.randint(2, 19)), reverse=True)
        name, other = draw.sample(NAMES, 2)
        question = story.format(name=name, other=other, things=draw.choice(THINGS), a=a, b=b)
        found[question] = str(answer(a, b))
    return [{"question": question, "answer": answer} for question, answer in found.items()]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-") or not all(n.isdecimal() for n in sys.argv[2:]):
        sys.exit(__doc__)
    count, file = int(sys.argv[2]) if sys.argv[2:] else 3000, Path(sys.argv[1])
    if not 1 <= count <= 100_000 or file.exists() or not file.absolute().parent.is_dir():
        sys.exit("word_problems.py: expected a file that does not exist yet in a folder that does, and 1 to 100000 problems")
    lines = problems(count)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} problems written to {sys.argv[1]}")
