r"""Answers: the number that a solution ends on. One reader serves training, evaluation and the reference solutions.

    #### 42     \boxed{42}     <answer>42</answer>     the answer is 42     else the last number of the text

The first of these forms that holds a number counts, and of several of one form the last. Inside it, what stands after
an equals sign counts. Signs, thousands separators, currency, percent, decimals, fractions (3/4, 1 1/2, \frac{3}{4}), small
exponents and units are understood, and numbers are compared as exact fractions: 0.5 equals 1/2, and 0.1 + 0.2 is no
surprise. A text is scanned once from left to right, and a number of over a thousand digits is none: hostile text costs
no more time than any other of its length.
"""
import re
from fractions import Fraction

LONGEST = 1000
WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
NUMBER = re.compile(rf"(?P<sign>(?<![0-9A-Za-z)])[-\u2212])?(?:[$\u20ac\u00a3\u00a5](?P<minus>[-\u2212])?)?"
                    rf"(?:(?P<whole>{WHOLE})(?P<decimals>\.[0-9]+)?|(?P<bare>\.[0-9]+))"
                    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,2})(?![0-9]))?(?:(?: (?P<top>[0-9]+))?/(?P<bottom>[0-9]+)(?![0-9]))?")
FRACTION = re.compile(r"\\[dt]?frac\{([0-9]{1,50})\}\{([0-9]{1,50})\}")
PLAINER = (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%"), ("**", ""))


def read_number(match: re.Match) -> Fraction | None:
    """A match of NUMBER -> its exact value; None for one that is too long or divides by zero."""
    if match.end() - match.start() > LONGEST:
        return None
    whole, decimals = (match["whole"] or "0").replace(",", ""), (match["decimals"] or match["bare"] or ".")[1:]
    value = Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** int(match["exponent"] or 0)
    if match["bottom"]:
        if not int(match["bottom"]):
            return None
        value = value + Fraction(int(match["top"]), int(match["bottom"])) if match["top"] else value / int(match["bottom"])
    return -value if match["sign"] or match["minus"] else value


def numbers(text: str) -> list[re.Match]:
    return list(NUMBER.finditer(text))


def plainer(text: str) -> str:
    """LaTeX's ways of writing a number -> ordinary ones."""
    for old, new in PLAINER:
        text = text.replace(old, new)
    return FRACTION.sub(r"\1/\2", text)


def inside(text: str, form: str) -> str | None:
    """What the last use of one form holds, None if there is none."""
    start = text.lower().rfind(form)
    if start < 0:
        return None
    rest = text[start + len(form):]
    if form == "\\boxed{":
        depth = 1
        for end, letter in enumerate(rest):
            depth += (letter == "{") - (letter == "}")
            if not depth:
                return rest[:end]
        return rest
    return rest.split("</answer>")[0] if form == "<answer>" else rest.split("\n")[0]


def answer_of(text: str) -> Fraction | None:
    """The number that a solution ends on, None if it has none."""
    text = plainer(text)
    for form in ("####", "\\boxed{", "<answer>", "answer is"):
        held = inside(text, form)
        if held is None:
            continue
        for part in (held.rsplit("=", 1)[-1], held):
            if found := NUMBER.search(part):
                return read_number(found)
    found = None
    for found in NUMBER.finditer(text):
        pass
    return read_number(found) if found else None
