r"""Answers: the number that a solution ends on.

    #### 42    \boxed{42}    <answer>42</answer>    the answer is 42, answer: 42    the last number

The first of these forms that holds a number counts, and of several of one form the last. Inside it,
what stands after an equals sign counts; #### must be followed by the number itself, since it is
also a heading. Signs, thousands separators, currency, percent, decimals, fractions (3/4, 1 1/2,
\frac{3}{4}), small exponents and units are understood. Numbers are compared as exact fractions: 0.5
equals 1/2.

A text is scanned from left to right a fixed number of times, and a number of over a thousand digits
is ignored, so hostile text costs no more time than any other of its length. Nothing is evaluated.
"""
import re
from fractions import Fraction

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
