"""The bound of an expression's digits is one, and lets answers through."""

from __future__ import annotations

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st
from sympy import Add, Integer, Mul, Pow, Symbol, binomial, factorial

from lockstep.judging.math.size import MAX_DIGITS, _digits, is_small

X = Symbol("x")


def together(parts):
    pair, small = st.tuples(parts, parts), st.integers(-6, 40)
    return (
        st.builds(lambda ab: Add(*ab, evaluate=False), pair)
        | st.builds(lambda ab: Mul(*ab, evaluate=False), pair)
        | st.builds(lambda a, n: Pow(a, Integer(n), evaluate=False), parts, small)
        | st.builds(lambda a: Mul(1, Pow(a, -1, evaluate=False), evaluate=False), parts)
        | st.builds(lambda n: factorial(Integer(abs(n)), evaluate=False), small)
        | st.builds(lambda n, k: binomial(Integer(abs(n)), Integer(abs(k)), evaluate=False), small, small)
    )


@settings(max_examples=60, deadline=None)
@example(Add(1, Pow(30, -6, evaluate=False), evaluate=False))  # numerator and denominator have more together
@given(st.recursive(st.integers(-30, 30).map(Integer), together, max_leaves=5))
def test_no_number_has_more_digits_than_the_bound(expression):
    bound = _digits(expression)
    if bound <= 2000:
        value = expression.doit()
        if value.is_Rational:
            assert max(math.log10(max(1, abs(value.p))), math.log10(value.q)) <= bound + 1e-9


def power(*parts):
    return parts[0] if len(parts) == 1 else Pow(parts[0], power(*parts[1:]), evaluate=False)


def test_answers_are_small_and_towers_are_not():
    ten, nine = Integer(10), Integer(9)
    half = Mul(1, Pow(2, -1, evaluate=False), evaluate=False)
    roots = X
    for _ in range(10):
        roots = Pow(Add(2, roots, evaluate=False), half, evaluate=False)
    for small in (
        power(Integer(2), Integer(2005)), factorial(1000, evaluate=False), binomial(10**9, 2, evaluate=False),
        power(ten, Integer(MAX_DIGITS // 2)), power(X, X, X), Pow(Add(X, 1), 1000, evaluate=False), roots,
    ):  # fmt: skip
        assert is_small(small), small
    for large in (
        power(ten, ten, ten), power(nine, nine, nine, nine), factorial(factorial(factorial(9, evaluate=False), evaluate=False)
        , evaluate=False), binomial(10**9, 5 * 10**8, evaluate=False), Mul(0, power(ten, ten, ten), evaluate=False),
        power(Integer(1), ten, ten, ten), power(Integer(0), power(ten, ten, ten)), power(X, X, X, X),
    ):  # fmt: skip
        assert not is_small(large), large
