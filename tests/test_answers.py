"""The answer reader: every form, exact comparison, hostile text, and all of GSM8K when it is at hand."""
import json
import os
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from answers import answer_of

GSM8K = os.environ.get("SUS_GSM8K")


@pytest.mark.parametrize("text, expected", [
    ("#### 42", 42), ("#### -1,234.50", Fraction(-2469, 2)), ("so 7\n#### 5 apples\n", 5), ("#### 1\nno\n#### 2", 2),
    (r"\boxed{12}", 12), (r"so \boxed{\frac{3}{4}}", Fraction(3, 4)), (r"\boxed{\$1{,}000}", 1000), (r"\boxed{ x = {5} }", 5),
    ("<answer>12 apples</answer> or 5", 12), ("<answer>12", 12), ("The answer is $18.", 18), ("the ANSWER IS: 3 + 4 = 7.", 7),
    ("answer is 5\nor 6", 5), ("we get 3, then 9.", 9), ("It costs $7.", 7), ("50%", 50), ("a 5% rise to 1,000,000 people", 1000000),
    ("10-5", 5), ("x = -5", -5), ("(-3)", -3), ("2-3=-1", -1), ("-$5", -5), ("$-5", -5), ("\u22125", -5), ("- 5", 5),
    (".5", Fraction(1, 2)), ("0.50", Fraction(1, 2)), ("1/2", Fraction(1, 2)), ("1 1/2", Fraction(3, 2)), ("1e3", 1000),
    ("1,2,3", 3), ("1234,567", 567), ("**12**", 12), ("12 km", 12), ("no number", None), ("", None), ("1/0", None), ("#### none, 7", 7),
    ("#### Step 3: Add\n48+24=72\nso \\boxed{72}", 72), ("#### Step 2\nThe final answer is 18", 18), (r"\boxed{1\frac{1}{2}}", Fraction(3, 2)),
    (r"\dfrac{1,000}{2}", 500), (r"\frac{3.5}{7}", Fraction(1, 2)), (r"-\frac{ 3 }{4}", Fraction(-3, 4)), (r"\frac12", Fraction(1, 2)),
    ("The answer is 72. In April x = 48.", 72), ("Answer: 42\n\nNote: 3 eggs.", 42), ("**Answer:** 12 eggs\n\n2. check", 12),
    ("the answer is:\n\n\\[ 42 \\]\n(for all 3)", 42), ("<ANSWER>5</ANSWER>, so 6 = 7", 5), ("\u0130 ####142", 142), ("\u20135", -5),
    ("\uff12 and \u0663", None), ("1e999", 999), ("9" * 5000, None)])
def test_forms(text, expected):
    assert answer_of(text) == expected


def test_numbers_are_exact():
    assert answer_of("0.1") + answer_of("0.2") == answer_of("0.3")
    assert answer_of("9007199254740993") != answer_of("9007199254740992")              # floats cannot tell
    assert answer_of("1/3") != answer_of("0.3333333333333333")


@pytest.mark.parametrize("piece", ["1", "1,", "1/", "1 ", "111,", "$", "-", ".", "1e", "\\boxed{", "\\frac{", "####", "answer is ", "=", "1 1", "{"])
def test_a_megabyte_of_anything_takes_no_longer_than_its_length_says(piece):
    def seconds(count):
        start = time.perf_counter()
        answer_of(piece * count)
        return time.perf_counter() - start
    small = min(seconds(25_000 // len(piece)) for _ in range(3))
    assert seconds(1_000_000 // len(piece)) < 400 * max(small, 1e-4)       # 40 times the text; quadratic would be 1,600


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=300) | st.text(alphabet="0123456789.,/-+$%e#\\boxed{}<answer>is =\n", max_size=300))
def test_any_text_gives_a_number_or_none(text):
    assert isinstance(answer_of(text), Fraction | None)


@settings(max_examples=300, deadline=None)
@given(st.integers(-10 ** 12, 10 ** 12), st.integers(0, 3))
def test_what_is_written_is_read(number, decimals):
    value = Fraction(number, 10 ** decimals)
    for form in ("#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is ${}.", "and so 3 plus 4 is {}"):
        written = f"{number / 10 ** decimals:,.{decimals}f}"
        if Fraction(written.replace(",", "")) == value:
            assert answer_of(form.format(written)) == value


@pytest.mark.skipif(not GSM8K, reason="SUS_GSM8K does not name a folder with GSM8K's train.jsonl and test.jsonl")
def test_every_reference_solution_of_gsm8k_is_read():
    count = 0
    for line in (line for name in ("train", "test") for line in (Path(GSM8K) / f"{name}.jsonl").read_text().splitlines()):
        solution, count = json.loads(line)["answer"], count + 1
        assert answer_of(solution) == Fraction(solution.split("####")[1].strip().replace(",", ""))
    assert count == 8792
