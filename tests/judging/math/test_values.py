from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.judging.math.values import Comparator, Leaf, Undecided, number, read_leaf


@settings(max_examples=50, deadline=None)
@given(st.fractions(max_denominator=500, min_value=-(10**6), max_value=10**6), st.data())
def test_a_number_is_the_fraction_that_it_writes(value, data):
    top, bottom = abs(value.numerator), value.denominator
    forms = [rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", rf"{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}"]
    forms += [f"{top // bottom} {top % bottom}/{bottom}", rf"{top}:{bottom}"] if top else []
    written = data.draw(st.sampled_from(forms))
    assert number(("-" if value < 0 else "") + written) == value


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 999), st.text("0123456789", max_size=4), st.text("0123456789", min_size=1, max_size=4))
def test_a_repeating_decimal_is_its_limit(whole, fixed, repeated):
    value = number(rf"{whole}.{fixed}\overline{{{repeated}}}")
    truncated = Fraction(f"{whole}.{fixed}{repeated * 20}")
    assert value is not None
    assert 0 <= value - truncated <= Fraction(1, 10 ** (len(fixed) + 20 * len(repeated)))


@pytest.mark.parametrize("text", ["", "x", "1+1", r"\frac{1}{0}", "1 2", r"\sqrt{4}", "1,2", "1e5", "1:0", "01:30"])
def test_what_must_be_computed_is_no_number(text):
    assert number(text) is None


@pytest.mark.parametrize(
    ("text", "leaf"),
    [
        ("5", Leaf("5")),
        (r"2\sqrt{3}\text{ centimeters}", Leaf(r"2\sqrt{3}", "cm")),
        (r"5\text{ cm}^2", Leaf("5", "cm^2")),
        (r"5 \text{square inches}", Leaf("5", "in^2")),
        (r"-\$5", Leaf("-5", "dollar")),
        (r"5\%", Leaf("5", "percent")),
        (r"50^\circ \text{F}", Leaf("50", "degree")),
        (r"5\text{ apples}", Leaf("5", "?")),
        (r"\text{apples}", Leaf(r"\text{apples}")),
        (r"\sin 30^\circ", Leaf(r"\sin30^\circ")),
        (r"\pi r + 1", Leaf(r"\pi r+1")),
        ("3 1/2", Leaf("3 1/2")),
    ],
)
def test_a_value_is_read_with_its_unit(text, leaf):
    assert read_leaf(text) == leaf


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        (Leaf("5", "cm"), Leaf("5"), True),
        (Leaf("5", "cm"), Leaf("5", "m"), False),
        (Leaf("5", "cm"), Leaf("5", "?"), True),
        (Leaf("50", "percent"), Leaf("0.5"), True),
        (Leaf("50", "percent"), Leaf("0.5", "percent"), False),
        (Leaf("1101_2"), Leaf("1101"), False),
        (Leaf("x"), Leaf("y"), False),
        (Leaf(""), Leaf(""), False),
        (Leaf(r"\text{Yes}"), Leaf("yes"), True),
    ],
)
def test_values_are_compared_with_their_units(answer, truth, same):
    assert Comparator().leaf(answer, truth) is same


def test_what_needs_algebra_is_left_open():
    with pytest.raises(Undecided):
        Comparator().leaf(Leaf("x+1"), Leaf("1+x"))
