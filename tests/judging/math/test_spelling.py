# ruff: noqa: RUF001  (the characters are meant)
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.judging.math.spelling import brace_arguments, closing_braces, spell


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\frac\pi 2", r"\frac{\pi} {2}"),
        (r"\frac{\sqrt3}2", r"\frac{\sqrt{3}}{2}"),
        (r"\sqrt[3]2", r"\sqrt[3]{2}"),
        (r"\left( 1,\, 2 \right)", "( 1, 2 )"),
        (r"x^{2}_{3}", "x^2_3"),
        (r"x^{10}", "x^{10}"),
        ("$5$", "5"),
        (r"\$5", r"\$5"),
        ("5%", r"5\%"),
        ("1,000", "1000"),
        (r"1,\!000", "1000"),
        ("(1,000)", "(1,000)"),
        ("1,000, 2", "1000, 2"),
        ("12 square units.", r"12 \text{square units}"),
        ("sin x", r"\sin x"),
        ("abc+d", "abc+d"),
        (r"1 \text{ or } 2", r"1 \lor 2"),
        (r"\text{(B), (C)}", r"\text{(B)}, \text{(C)}"),
        ("x≤3", r"x\le 3"),
        ("−２", "-2"),
    ],
)
def test_an_answer_has_one_spelling(written, spelled):
    assert spell(written) == spelled


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.sampled_from("12ab"), lambda inner: st.tuples(inner, inner).map(lambda p: rf"\frac{{{p[0]}}}{{{p[1]}}}"), max_leaves=8
    )
)
def test_arguments_that_have_braces_stay_as_they_are(text):
    assert brace_arguments(text) == text
    assert brace_arguments(text.replace("{1}", "1").replace("{2}", "2")).count("{") == text.count("{")


def test_braces_are_matched_and_escaped_ones_are_characters():
    assert closing_braces(r"{a{b}\}}{") == {2: 4, 0: 7}
