r"""Answers: the number that a solution ends on. One reader serves training, evaluation and the reference solutions.

    #### 42     \boxed{42}     <answer>42</answer>     the answer is 42, answer: 42     else the last number of the text

The first of these forms that holds a number counts, and of several of one form the last. Inside it, what stands after
an equals sign counts; #### must be followed by the number itself, since it is also a heading. Signs, thousands separators,
currency, percent, decimals, fractions (3/4, 1 1/2, \frac{3}{4}), small exponents and units are understood, and numbers are
compared as exact fractions: 0.5 equals 1/2, and 0.1 + 0.2 is no surprise. A text is scanned from left to right a fixed
number of times, and a number of over a thousand digits is none: hostile text costs no more time than any other of its length.
"""
import re
from fractions import Fraction

LONGEST = 1000
WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
MINUS = "[-\u2212\u2013]"
NUMBER = re.compile(rf"(?P<sign>(?<![0-9A-Za-z)]){MINUS})?(?:[$\u20ac\u00a3\u00a5](?P<minus>{MINUS})?)?"
                    rf"(?:(?P<whole>{WHOLE})(?P<decimals>\.[0-9]+)?|(?P<bare>\.[0-9]+))"
                    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,2})(?![0-9]))?(?:(?: (?P<top>[0-9]+))?/(?P<bottom>[0-9]+)(?P<rest>\.[0-9]+)?)?")
PART = r"\{ {0,9}(-?[0-9]{1,50}(?:,[0-9]{3}){0,9}(?:\.[0-9]{1,50})?) {0,9}\}"
FRACTION = re.compile(rf"(?P<digit>[0-9])?\\[dt]?frac(?:{PART}{PART}|([0-9])([0-9]))")
PLAINER = (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%"), ("**", ""))
SENTENCE_END = re.compile(r"[.!?](?:\s|$)")
FORMS = ("####", "\\boxed{", "<answer>", "answer is", "answer:")


def read_number(match: re.Match) -> Fraction | None:
    """A match of NUMBER -> its exact value; None for one that is too long or divides by zero."""
    if match.end() - match.start() > LONGEST:
        return None
    whole, decimals = (match["whole"] or "0").replace(",", ""), (match["decimals"] or match["bare"] or ".")[1:]
    value = Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** int(match["exponent"] or 0)
    if match["bottom"]:
        bottom = Fraction(match["bottom"] + (match["rest"] or ""))
        if not bottom:
            return None
        value = value + int(match["top"]) / bottom if match["top"] else value / bottom
    return -value if match["sign"] or match["minus"] else value


def plainer(text: str) -> str:
    """LaTeX's ways of writing a number -> ordinary ones."""
    for old, new in PLAINER:
        text = text.replace(old, new)

    def ordinary(match):
        top, bottom = (part.replace(",", "") for part in match.groups()[1:] if part)
        return f"{match['digit']} {top}/{bottom}" if match["digit"] else f"{top}/{bottom}"
    return FRACTION.sub(ordinary, text)


def inside(text: str, form: str) -> str | None:
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
    # Prose: to the end of the sentence, on this line or, if there is no number in it, on the next one that says anything.
    lines = [line for line in rest[:10_000].split("\n", 20) if line.strip(" :*\r\t\\[]")]
    numbered = [line for line in lines[:2] if NUMBER.search(line)]
    return SENTENCE_END.split(numbered[0], maxsplit=1)[0] if numbered else ""


def answer_of(text: str) -> Fraction | None:
    """The number that a solution ends on, None if it has none."""
    text = plainer(text)
    for form in FORMS:
        held = inside(text, form)
        if held is None:
            continue
        for part in (held.rsplit("=", 1)[-1], held):
            if found := NUMBER.match(part.strip(" \t:")) if form == "####" and "=" not in held else NUMBER.search(part):
                return read_number(found)
    found = None
    for found in NUMBER.finditer(text):
        pass
    return read_number(found) if found else None
