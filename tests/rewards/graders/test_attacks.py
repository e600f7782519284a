"""Responses that are made to hang, crash or exhaust a rule: every rule gives a score or raises RewardError, soon."""

from __future__ import annotations

import time

import pytest

from lockstep.errors import RewardError
from lockstep.judging import math
from lockstep.judging.math.spelling import spell
from lockstep.judging.math.symbolic import SymbolicComparator
from lockstep.rewards.graders import exact_match, gsm8k, multiple_choice

ENDINGS = {"endings": ["he runs", "she sits", "a dog barks", "it rains"]}
RULES = {
    "gsm8k strict": lambda text: gsm8k.compute_score(text, "42"),
    "gsm8k flexible": lambda text: gsm8k.compute_score(text, "42", method="flexible"),
    "multiple choice": lambda text: multiple_choice.compute_score(text, "D", ENDINGS),
    "exact match": lambda text: exact_match.compute_score(text, "42"),
    "math": lambda text: math.compute_score(text, r"\sqrt{42}"),
}
UNITS = [
    "#", "#### ", "####1/", "#### -", "####" + " " * 99, "1", "1,", "1,111", "1.", "1/", "1 ", "1" * 999 + "/", "$", "-", "=", ":", " ",
    "\n", "{", "}", "(", "[", "\\", r"\boxed{", r"\frac", r"\frac{", r"\frac1", r"\text{", r"\text{a}", r"\left(", r"\sqrt 1 ", r"\pm",
    "^{", "&", "A", "A ", "A\n", "A. x\n", "(A)", "(A) or ", "Answer: ", "Answer: A ", "answer is ", "is ", "ab ",
    "\0", "\ud800", "\uff19", "e9",
]  # fmt: skip
MEGABYTE = 10**6
PATIENCE_S = 2.0  # of this process; the one for algebra has a deadline


def timed(rule, text):
    start = time.process_time()
    score = RULES[rule](text)
    assert time.process_time() - start < PATIENCE_S
    return score


@pytest.mark.parametrize("rule", RULES)
def test_a_megabyte_of_anything_is_scored_soon(rule):
    RULES[rule](r"\boxed{\frac{42}{\sqrt{42}}}")  # the process for algebra has started
    for unit in UNITS:
        assert timed(rule, unit * (MEGABYTE // len(unit))) == 0.0


@pytest.mark.parametrize("size", [280, 1900, MEGABYTE])
def test_a_box_of_anything_is_scored_soon(size):
    RULES["math"](r"\boxed{\frac{42}{\sqrt{42}}}")
    for unit in UNITS:
        assert timed("math", rf"\boxed{{{unit * (size // len(unit))}}}") == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "{" * 10**5 + "1" + "}" * 10**5,
        r"\frac{" * 100 + "1" + "}{2}" * 100,
        r"\sqrt{" * 18 + "x" + "}" * 18,
        "9" * 1900,
        "10^{400000}",
        "0." + "1" * 1000 + r"\overline{" + "7" * 800 + "}",
        "x" * 290,
        r"\lim_{x\to0}\frac{\sin x}{x}",
        "10^{10^{10}}",
        "9^{9^{9^{9}}}",
        "((9!)!)!",
        r"\sin(10^{10^8})",
        r"i^{10^{10^{10}}}",
        r"\gcd(10^{10^9},3)",
        r"\binom{1000000000}{500000000}",
        r"\lfloor 10^{10^{10}} \rfloor",
        r"\prod_{k=1}^{10^9}k",
        r"\frac{1}{" * 9 + "2" + "}" * 9,
        "(" * 20 + "2" + ")" * 20,
        "|x|" * 90,
        r"\log_2(" * 16 + "5" + ")" * 16,
        r"\log_{" * 6 + "x" + "}5" * 6,
        r"\begin{vmatrix}" + r"\\".join("&".join(f"x_{i}" for i in range(j, j + 6)) for j in range(6)) + r"\end{vmatrix}",
    ],
)
def test_giant_mathematics_is_wrong_rather_than_slow(answer):
    """In the process for algebra too, which is never killed for it."""
    assert timed("math", rf"\boxed{{{answer}}}") == 0.0
    start = time.process_time()
    assert not SymbolicComparator().expressions(spell(answer), r"\sqrt{42}")
    assert time.process_time() - start < PATIENCE_S


@pytest.mark.parametrize("answer", [r"\int_0^\infty e^{-x^2}\sin(x^x)dx"])
def test_mathematics_without_an_end_is_a_missing_reward(answer):
    with pytest.raises(RewardError):
        math.compute_score(rf"\boxed{{{answer}}}", r"\sqrt{42}", timeout_s=0.3)
