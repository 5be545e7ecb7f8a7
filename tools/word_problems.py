"""Easy word problems with numbers below 20, which a model of 135 million parameters can learn.

    python tools/word_problems.py FILE.jsonl [HOW_MANY]

Each line of the new file has a question and its answer. The same command writes the same file."""
import json
import random
import sys

NAMES = "Ada Ben Cleo Dan Eva Finn Gina Hugo Ida Jon Kim Leo Mia Noah Olga Paul Rosa Sam Tina Vera"
THINGS = "apples books coins cards eggs flowers marbles pencils shells stamps stickers toys"
STORIES = """+ {x} has {a} {things} and gets {b} more. How many {things} does {x} have now?
+ {x} has {a} {things} and {y} has {b}. How many {things} do they have together?
+ There were {a} {things} on the table and {x} put {b} more there. How many are there now?
- {x} had {a} {things} and gave {b} of them to {y}. How many does {x} have left?
- {x} has {a} {things} and {y} has {b}. How many more {things} does {x} have than {y}?
- {x} needs {a} {things} and has {b}. How many {things} are still missing?
* {x} has {a} boxes with {b} {things} in each. How many {things} does {x} have?
* {x} finds {b} {things} a day. How many {things} does {x} find in {a} days?"""


def write_problems(path: str, count: str = "3000") -> None:
    if path.startswith("-") or not 1 <= int(count) <= 100_000:
        raise ValueError("expected a new file and 1 to 100000 problems")
    rng, answers = random.Random(0), {}
    while len(answers) < int(count):
        operator, story = rng.choice(STORIES.splitlines()).split(" ", 1)
        b, a = sorted((rng.randint(2, 19), rng.randint(2, 19)))  # no answer is below zero
        x, y = rng.sample(NAMES.split(), 2)
        question = story.format(x=x, y=y, things=rng.choice(THINGS.split()), a=a, b=b)
        answers[question] = str({"+": a + b, "-": a - b, "*": a * b}[operator])
    with open(path, "x", encoding="utf-8") as file:
        for question, answer in answers.items():
            print(json.dumps({"question": question, "answer": answer}), file=file)
    print(f"{count} problems written to {path}")


if __name__ == "__main__":
    try:
        write_problems(*sys.argv[1:])
    except (TypeError, ValueError, OSError) as error:
        sys.exit(f"{__doc__}\nerror: {error}")
