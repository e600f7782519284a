"""The judge itself, in this process: the limits of `same` are for its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.judging.math.symbolic import SymbolicComparator

judge = SymbolicComparator()
coefficients = st.lists(st.integers(-9, 9), min_size=2, max_size=4)


def multiply(a, b):
    product = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] += x * y
    return product


def polynomial(values):
    return "+".join(rf"({value})x^{{{power}}}" for power, value in enumerate(values))


@settings(max_examples=8, deadline=None)
@given(coefficients, coefficients, st.integers(0, 3), st.integers(-1, 1))
def test_a_product_is_its_expansion_and_nothing_else(a, b, power, change):
    expanded = multiply(a, b)
    expanded[power % len(expanded)] += change
    assert judge.expressions(f"({polynomial(a)})({polynomial(b)})", polynomial(expanded)) == (change == 0)


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        (r"\pi\cdot2^{-100}", r"\pi\cdot2^{-101}", False),
        (r"2^{100}+1", r"2^{100}", False),
        (r"2^{2005}\sqrt{2}-1", r"2^{2005}\sqrt{2}", False),
        (r"2\cdot2^{2005}\sqrt{2}", r"2^{2006}\sqrt{2}", True),
        ("100!+1", "100!", False),
        (r"\frac{1}{2^{400}}", r"\frac{1}{2^{401}}", False),
        (r"\frac{\pi}{2^{400}}", r"\frac{\pi}{2^{401}}", False),
        (r"\frac{\pi}{2^{400}}", r"\frac{2\pi}{2^{401}}", True),
        (r"\pi", "3.14159265358979323846", False),
        (r"10^{-30}\sqrt{2}", "0", False),
        (r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}", "0", True),
        ("AB", "ab", False),
        (r"\sqrt{x^2}", "x", False),
        (r"\frac{x^2-1}{x-1}", "x+1", True),
        ("f(x)", "g(x)", False),
        ("x+", "x", False),
        ("(" * 50 + "x" + ")" * 50, "x", False),
        (r"\frac{x}{0}", r"\frac{x}{0}+1", False),
    ],
)
def test_equality_is_exact(answer, truth, same):
    assert judge.expressions(answer, truth) is same


@pytest.mark.parametrize(
    ("sign", "answer", "truth", "same"),
    [
        ("=", ("y", "2x+3"), ("2x-y", "-3"), True),
        ("=", ("2x+y", "4"), ("4x+2y", "8"), True),
        ("=", ("x", "5"), ("y", "5"), False),
        ("=", ("x", "x"), ("y", "y"), False),
        ("<", ("2x", "4"), ("x", "2"), True),
        ("<", ("-x", "-2"), ("x", "2"), False),
        ("<", ("-x", "-2"), ("2", "x"), True),
        ("=", ("x", "?"), ("x", "?"), False),
    ],
)
def test_relations_are_the_same_but_for_a_factor(sign, answer, truth, same):
    assert judge.relations(sign, answer, truth) is same
