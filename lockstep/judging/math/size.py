"""How large the numbers in an expression would be, and how long they take, before anything is computed.

`10^{10^{10}}` is a few characters and no computer's number. What the parser returns is not evaluated yet, so a bound follows from its tree.
"""

import math
from collections.abc import Callable
from typing import Any

from sympy import Add, Float, Mul, Pow, Product, Rational, Sum, binomial, cosh, exp, factorial, gamma, log, sinh
from sympy.functions.combinatorial.factorials import CombinatorialFunction
from sympy.matrices import MatrixBase

MAX_DIGITS = 20_000
_MAX_WORK = 20_000
_MAX_LOGS = 4
_TERM = 10
"""Steps that a term of a sum takes beside those of its parts."""
_LOG_E = math.log10(math.e)
_ATOM = math.log10(5)
"""Of a constant, and of a variable: no point that values are compared at has a larger one."""
_HUGE = 1e100
"""Above the factorials that anybody computes."""


def is_small(expression: Any) -> bool:
    """Whether all numbers in it have at most 20,000 digits, before and behind the point, and evaluating it takes some thousand steps."""
    return _log_depth(expression) <= _MAX_LOGS and _digits(expression) <= MAX_DIGITS and _work(expression) <= _MAX_WORK


def _log_depth(node: Any) -> int:
    """How many logarithms are inside each other. SymPy evaluates the inner ones again for each one around them: four take a second, six
    more than a minute."""
    return isinstance(node, log) + max(map(_log_depth, _parts(node)), default=0)


def _digits(node: Any) -> float:
    """A bound of the digits of a value before the point, and of those behind it (of a fraction: of numerator and denominator, each); of
    several values, of all together. NaN and infinity: too many."""
    if isinstance(node, Rational):
        return math.log10(abs(node.p) + 1) + math.log10(max(1, node.q))
    if isinstance(node, Float):
        _, _, exponent, bits = node._mpf_
        return (abs(exponent) + bits) * math.log10(2)
    parts = _parts(node)
    if not parts:
        return _ATOM
    sizes = [_digits(part) for part in parts]
    total = sum(sizes) + math.log10(len(sizes))
    if isinstance(node, Pow):
        return sizes[0] * _bound(parts[1]) + sizes[1]
    if isinstance(node, exp | cosh | sinh):
        return _LOG_E * _bound(parts[0]) + sizes[0]
    if isinstance(node, binomial):
        n, k = map(_bound, parts)
        return min(n * math.log10(2), k * total) + total
    if isinstance(node, Sum | Product):
        terms = math.prod(sum(map(_bound, limits[1:])) + 1 for limits in node.limits)
        return total * terms
    if isinstance(node, factorial):
        return _LOG_E * math.lgamma(min(_bound(parts[0]), _HUGE) + 1) + total
    if isinstance(node, CombinatorialFunction | gamma):
        return (sum(map(_bound, parts)) + 1) * (total + 1)
    return total


def _bound(node: Any) -> float:
    """A number that the size of the value is not above."""
    if isinstance(node, Rational):
        return _finite(lambda: abs(node.p) / node.q)
    if isinstance(node, Add):
        return sum(map(_bound, node.args))
    if isinstance(node, Mul):
        return math.prod(map(_bound, node.args))
    if isinstance(node, Pow) and isinstance(node.exp, Rational) and (node.exp > 0 or isinstance(node.base, Rational)) and node.base:
        return _finite(lambda: _bound(node.base) ** (node.exp.p / node.exp.q))
    return _finite(lambda: 10.0 ** _digits(node))


def _work(node: Any) -> float:
    """Steps of an evaluation: SymPy evaluates the factors of a product twice, and the terms of a sum as often as there are any."""
    times = 2.0 if isinstance(node, Mul) else 1.0
    if isinstance(node, Sum | Product):
        times = _TERM * math.prod(sum(map(_bound, limits[1:])) + 1 for limits in node.limits)
    return 1 + times * sum(map(_work, _parts(node)))


def _parts(node: Any) -> list[Any]:
    return list(node.flat() if isinstance(node, MatrixBase) else getattr(node, "args", ()))


def _finite(number: Callable[[], float]) -> float:
    try:
        return number()
    except OverflowError:
        return math.inf
