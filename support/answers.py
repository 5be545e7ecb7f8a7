r"""Answers: the number that a solution ends on.

    #### 42    \boxed{42}    <answer>42</answer>    the answer is 42, answer: 42    the last number

The first of these forms that holds a number counts, and of several of one form the last. Inside it,
what stands after an equals sign counts; #### must be followed by the number itself, since it is
also a heading. Signs, thousands separators, currency, percent, decimals, fractions (3/4, 1 1/2,
\frac{3}{4}), small exponents and units are understood. Numbers are compared as exact fractions: 0.5
equals 1/2.

A text is scanned from left to right a fixed number of times, and a number of over a thousand digits
is ignored, so hostile text costs no more time than any other of its length. Nothing is evaluated.

Below are also the readers of records and JSONL files with a question and such an answer.
"""
import json
import re
from fractions import Fraction
from pathlib import Path

MOST_DIGITS = 1000
MINUS = "[-\u2212\u2013]"
CURRENCY = "[$\u20ac\u00a3\u00a5]"
WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
NUMBER = re.compile(
    rf"(?P<sign>(?<![0-9A-Za-z)]){MINUS})?"
    rf"(?:{CURRENCY}(?P<minus>{MINUS})?)?"
    rf"(?:(?P<whole>{WHOLE})(?P<decimals>\.[0-9]+)?|(?P<bare>\.[0-9]+))"
    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,2})(?![0-9]))?"
    r"(?:(?: (?P<top>[0-9]+))?/(?P<bottom>[0-9]+)(?P<rest>\.[0-9]+)?)?")
LATEX_PART = r"\{ {0,9}(-?[0-9]{1,50}(?:,[0-9]{3}){0,9}(?:\.[0-9]{1,50})?) {0,9}\}"
LATEX_FRACTION = re.compile(
    rf"(?P<digit>[0-9])?\\[dt]?frac(?:{LATEX_PART}{LATEX_PART}|([0-9])([0-9]))")
LATEX_MARKS = (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%"), ("**", ""))
SENTENCE_END = re.compile(r"[.!?](?:\s|$)")
FORMS = ("####", "\\boxed{", "<answer>", "answer is", "answer:")


def read_number(match: re.Match) -> Fraction | None:
    """A match of NUMBER -> its exact value; None for one that is too long or divides by zero."""
    if match.end() - match.start() > MOST_DIGITS:
        return None
    whole = (match["whole"] or "0").replace(",", "")
    decimals = (match["decimals"] or match["bare"] or ".")[1:]
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    value *= Fraction(10) ** int(match["exponent"] or 0)
    if match["bottom"]:
        bottom = Fraction(match["bottom"] + (match["rest"] or ""))
        if not bottom:
            return None
        value = value + int(match["top"]) / bottom if match["top"] else value / bottom
    return -value if match["sign"] or match["minus"] else value


def remove_latex(text: str) -> str:
    """LaTeX's ways of writing a number -> ordinary ones."""
    for mark, plain in LATEX_MARKS:
        text = text.replace(mark, plain)

    def write_fraction(match):
        top, bottom = (part.replace(",", "") for part in match.groups()[1:] if part)
        return f"{match['digit']} {top}/{bottom}" if match["digit"] else f"{top}/{bottom}"
    return LATEX_FRACTION.sub(write_fraction, text)


def find_form(text: str, form: str) -> str | None:
    """What the last use of one form holds, None if there is none."""
    uses = list(re.finditer(re.escape(form), text, re.IGNORECASE))
    if not uses:
        return None
    rest = text[uses[-1].end():]
    if form == "####":
        return rest.split("\n")[0]
    if form == "<answer>":
        return re.split("</answer>", rest, maxsplit=1, flags=re.IGNORECASE)[0]
    if form == "\\boxed{":
        depth = 1
        for end, letter in enumerate(rest):
            depth += (letter == "{") - (letter == "}")
            if not depth:
                return rest[:end]
        return rest
    # Prose: to the end of the sentence, on this line or, if it has no number, on the next one.
    lines = [line for line in rest[:10_000].split("\n", 20) if line.strip(" :*\r\t\\[]")]
    numbered = [line for line in lines[:2] if NUMBER.search(line)]
    return SENTENCE_END.split(numbered[0], maxsplit=1)[0] if numbered else ""


def find_answer(text: str) -> Fraction | None:
    """The number that a solution ends on, None if it has none."""
    text = remove_latex(text)
    for form in FORMS:
        content = find_form(text, form)
        if content is None:
            continue
        if form == "####" and "=" not in content:
            match = NUMBER.match(content.strip(" \t:"))
        else:
            match = NUMBER.search(content.rsplit("=", 1)[-1]) or NUMBER.search(content)
        if match:
            return read_number(match)
    last = None
    for last in NUMBER.finditer(text):
        pass
    return read_number(last) if last else None


def read_pair(record: dict, where: str) -> tuple[str, Fraction]:
    """The question and the answer of a record; `where` it stands is for error messages."""
    question = record.get("question") if isinstance(record, dict) else None
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: expected an object with a question, a text that is not empty")
    if not question.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in question):
        raise ValueError(f"{where}: its question holds half of a surrogate pair, which is not text")
    answer, value = record.get("answer"), None
    if isinstance(answer, str):
        value = find_answer(answer)
    elif type(answer) in (int, float) and abs(answer) < 1e100:
        value = Fraction(str(answer))
    if value is None:
        raise ValueError(f"{where}: its answer is {str(answer)[:60]!r}, expected a number or a "
                         "solution that ends on one; other answers need their own judge (README)")
    return question.strip(), value


def read_pairs(file: Path) -> list[tuple[str, Fraction]]:
    """A JSONL file with a `question` and an `answer` on every line."""
    pairs = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, line {number}: not valid JSON ({error})") from None
        pairs.append(read_pair(record, f"{file}, line {number}"))
    return pairs


def read_split(path: Path, split: str, split_of) -> list[tuple[str, Fraction]]:
    """A file is divided by split_of(question), a folder by the words in its files' names."""
    if path.is_file():
        return [pair for pair in read_pairs(path) if split_of(pair[0]) == split]
    pairs = []
    for file in sorted(path.glob("*.jsonl")):
        splits = set(re.split("[^a-z]+", file.stem.lower())) & {"train", "validation", "test"}
        if len(splits) > 1:
            raise ValueError(f"{file} names more than one split of train, validation and test")
        if split in splits:
            pairs += read_pairs(file)
    return pairs


def read_gsm8k(split: str) -> list[tuple[str, Fraction]]:
    """GSM8K (Cobbe et al. 2021) through `datasets`."""
    if split == "validation":
        raise ValueError("gsm8k has no validation split: use test, or a folder of your own files")
    try:
        import datasets  # slow to import, and needed for the hub only
        rows = datasets.load_dataset("openai/gsm8k", "main", split=split)
    except Exception as error:  # the hub's client raises dozens of types
        why = type(error).__name__
        raise ValueError(f"gsm8k cannot be downloaded or found in the cache ({why}): check the "
                         "connection, or give a folder with train.jsonl and test.jsonl") from None
    return [read_pair(row, f"gsm8k {split}, row {number}") for number, row in enumerate(rows)]
