from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.utils.reward_score.math import compute_score, last_boxed, normalize


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} done }", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x \mid x > 0\right.}", r"\left\{x \mid x > 0\right."),
        (r"\fbox{7}", "7"),
        (r"$\boxed 5$ apples", "5"),
        (r"\boxed{ 6 }", " 6 "),
        (r"\boxed" + "\n{8}", "8"),
        (r"\boxed{3} and \boxedness{4}", "3"),
        (r"\boxed{9", None),
        (r"\boxed", None),
        ("5", None),
    ],
)
def test_the_last_box_is_found_with_its_nested_braces(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("1 + x", "1+x"),
        (r"\left(1,\,2\right)", "(1,2)"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\tfrac{1}{2}", r"\frac{1}{2}"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\frac{1}2", r"\frac{1}{2}"),
        (r"\frac ab", r"\frac{a}{b}"),
        (r"\frac\pi 2", r"\frac{\pi}{2}"),
        (r"\frac{\sqrt3}2", r"\frac{\sqrt{3}}{2}"),
        (r"\frac{\frac12}3", r"\frac{\frac{1}{2}}{3}"),
        (r"-3/4", r"-\frac{3}{4}"),
        (r"2\sqrt2", r"2\sqrt{2}"),
        (r"5\text{ cm}", "5"),
        (r"5 \text{ cm}^2", "5"),
        (r"5\mbox{ inches}", "5"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"x=\text{red}", r"\text{red}"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        ("90\u00b0", "90"),
        (r"50\%", "50"),
        (r"\$5", "5"),
        ("$5$", "5"),
        (".5x", "0.5x"),
        ("-.25", "-0.25"),
        ("007", "7"),
        ("0.5", r"\frac{1}{2}"),
        ("1,000", "1000"),
        (r"1{,}000", "1000"),
        (r"1,\!000", "1000"),
        ("12.", "12"),
        ("x=5", "5"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
)
def test_two_spellings_of_an_answer_are_the_same(answer, truth):
    assert compute_score(rf"Therefore \boxed{{{answer}}}.", truth) == 1.0
    assert compute_score(rf"Therefore \boxed{{{truth}}}.", answer) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("5", "6"),
        ("(1,2)", "(2,1)"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        ("0.05", "0.5"),
        ("10", "1"),
        ("100", "10"),
        (r"\text{red}", r"\text{blue}"),
        ("x=5", "x=6"),
        ("(1,050)", "(1,50)"),
        (r"\rightarrow", ""),
        ("-5", "5"),
        ("1.05", "1.5"),
    ],
)
def test_different_answers_stay_different(answer, truth):
    assert compute_score(rf"\boxed{{{answer}}}", truth or "arrow") == 0.0


def test_without_a_box_there_is_no_score():
    assert compute_score("the answer is 5", "5") == 0.0


@given(st.text(alphabet=r"\frac{sqt}12 .,=/-$%textbo^[]", max_size=40))
def test_any_string_is_normalised_without_an_error_and_equals_itself(text):
    assert isinstance(normalize(text), str)
    content = last_boxed(rf"\boxed{{{text}}}")
    if content == text and text.strip():
        assert compute_score(rf"\boxed{{{text}}}", text) == 1.0


@pytest.mark.parametrize(
    "unit",
    [
        "{",
        "}",
        "\\",
        r"\boxed{",
        r"\frac",
        r"\frac{",
        r"\frac1",
        r"\text{",
        r"\text{a}",
        " ",
        "0",
        ",000",
        "^",
        "$",
        r"\sqrt 1 ",
    ],
)
def test_the_time_of_scoring_grows_no_faster_than_the_text(unit):
    text = unit * (300_000 // len(unit))
    start = time.perf_counter()
    compute_score(text, "5")
    compute_score(rf"\boxed{{{text}}}", "5")
    compute_score(rf"\boxed {text}", "5")
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize("truth", [None, "", " "])
def test_a_missing_ground_truth_is_an_error(truth):
    with pytest.raises(DataError, match="ground_truth"):
        compute_score(r"\boxed{5}", truth)
