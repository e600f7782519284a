r"""Equality by algebra: the expressions are read by math-verify's LaTeX parser and compared by SymPy.

Runs in a process that can be killed (`lockstep.processes`): a parse or an evaluation may take for ever or all the memory.

Two expressions are the same when their difference is zero, to 20 digits behind the point, at several random points of their variables.
Decimals are read as exact fractions before, so 0.333 is not 1/3. What has no numerical value (matrices, unknown functions) goes to
`math_verify.verify`. Expressions of more than 300 characters or 10 levels of brackets are not read, nor those with numbers of more than
20,000 digits (size); numbers of more than 4,000 equal nothing that is written in another way.
"""

import functools
import logging
import random
import re
import resource
from typing import Any

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from math_verify import verify
from sympy import Expr, Float, I, MatrixBase, Rational, Symbol, binomial, log, nan, oo, zoo

from lockstep.judging.math.size import is_small
from lockstep.judging.math.spelling import spell
from lockstep.judging.math.structure import equal, parse
from lockstep.judging.math.values import Comparator

_MAX_EXPRESSION = 300
_MAX_DEPTH = 10
_MOST = {r"\|": 16, "&": 12, r"\\log": 12, r"\\(?:int|sum|prod|lim)(?![a-zA-Z])": 2}
"""What the parser, or SymPy, takes long over, and how often an expression may have it."""
_MAX_MEMORY = 4 * 1024**3
_NUM_POINTS = 4
_DIGITS = 30
_MAX_DIGITS = 4_000
_TOLERANCE = Float("1e-20")
_SMALL = Float("1e-90")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its own time-outs are off: ours kills


def same(answer: str, truth: str) -> bool:
    """Whether two answers, as written, are equal. For a process of its own: it limits that process's memory to 4 GiB.

    What cannot be read as mathematics equals nothing. Raises MemoryError, or whatever SymPy raises on a valid expression.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return equal(parse(spell(answer)), parse(spell(truth)), SymbolicComparator())


class SymbolicComparator(Comparator):
    """Decides what spelling leaves open."""

    def expressions(self, answer: str, truth: str) -> bool:
        a = _read(answer)
        b = _read(truth)
        if a is None or b is None:
            return False
        if a == b:
            return True
        if isinstance(a, MatrixBase) or isinstance(b, MatrixBase) or not (isinstance(a, Expr) and isinstance(b, Expr)):
            return bool(verify(b, a, timeout_seconds=None))
        points = _points(a.free_symbols | b.free_symbols)
        values = [(_value(a.xreplace(point)), _value(b.xreplace(point))) for point in points]
        if any(value is None for pair in values for value in pair):
            return bool(verify(b, a, timeout_seconds=None))
        if not all(_close(x, y) for x, y in values):
            return False
        return all(_is_zero((a - b).xreplace(point), max(abs(x), abs(y))) for point, (x, y) in zip(points, values, strict=True))

    def relations(self, sign: str, answer: tuple[str, str], truth: tuple[str, str]) -> bool:
        """The difference of the sides must be the same but for a factor: 2x > 4 is x > 2. For < and <= the factor is positive."""
        sides = [_read(side) for side in (*answer, *truth)]
        if not all(isinstance(side, Expr) for side in sides):
            return False
        a = sides[0] - sides[1]
        b = sides[2] - sides[3]
        values = [(_value(a.xreplace(point)), _value(b.xreplace(point))) for point in _points(a.free_symbols | b.free_symbols)]
        if any(x is None or y is None or abs(y) <= _TOLERANCE for x, y in values):
            return False
        factors = [x / y for x, y in values]
        if abs(factors[0]) <= _TOLERANCE or not all(_close(factor, factors[0]) for factor in factors):
            return False
        return sign in ("=", "!=") or bool(factors[0].is_extended_positive)


@functools.lru_cache(maxsize=256)
def _read(latex: str) -> Any:
    """A SymPy object, or None for what the parser cannot read."""
    latex = _prepared(latex)
    # The parser would add 2 3 up, and takes exponential time over brackets that are never closed.
    if len(latex) > _MAX_EXPRESSION or re.search("[0-9] [0-9]", latex) or not _is_balanced(latex):
        return None
    if any(len(re.findall(pattern, latex)) > most for pattern, most in _MOST.items()):
        return None
    try:
        expression = _Reader(config=ConversionConfig(lowercase_symbols=False)).parse(latex)
    except MemoryError:
        raise
    except Exception:  # the parser raises Exception itself, and whatever SymPy raises on half-read input
        return None
    if not is_small(expression):
        return None
    if isinstance(expression, Expr) and Symbol("i") in expression.free_symbols:
        expression = expression.xreplace({Symbol("i"): I})
    return None if expression in (nan, zoo) else expression


class _Reader(_Latex2Sympy):
    """The parser, which evaluates nothing: that is for who has seen how large the numbers are."""

    def convert_binom(self, binom: Any) -> Any:
        return binomial(self.convert_expr(binom.upper), self.convert_expr(binom.lower), evaluate=False)

    def handle_gcd_lcm(self, f: str, args: Any) -> Any:
        if not all(map(is_small, args)):
            raise ValueError(f"{f} of numbers that are too large")
        return super().handle_gcd_lcm(f, args)


def _is_balanced(latex: str) -> bool:
    """Whether brackets are closed, whatever their kinds, and at most 10 deep."""
    depth = 0
    for bracket in re.findall(r"[(\[{)\]}]", latex):
        depth += 1 if bracket in "([{" else -1
        if not 0 <= depth <= _MAX_DEPTH:
            return False
    return depth == 0


def _prepared(latex: str) -> str:
    """Decimals as fractions, degrees as radians where they are arguments, f' as its own name."""
    latex = re.sub(r"([0-9]*)\.([0-9]+)", lambda m: rf"{{\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}}}", latex)
    latex = re.sub(r"([0-9]+|[a-zA-Z]|\\[a-zA-Z]+)\^\\circ", r"(\\frac{\1\\pi}{180})", latex)
    latex = re.sub(r"_([0-9a-zA-Z]) ?", r"_{\1}", latex)
    latex = re.sub(r"(?<=[0-9])\(", r"\\cdot(", latex)
    return latex.replace("'", "_{prime}")


def _points(symbols: set[Any]) -> list[dict[Any, Rational]]:
    """Random values of the variables: of both signs, so that |x| is not x. One empty point where there are none."""
    generator = random.Random(0)
    ordered = sorted(symbols, key=str)
    return [
        {s: Rational(generator.randint(101, 499), 100) * (-1 if (i + j) % 3 == 1 else 1) for j, s in enumerate(ordered)}
        for i in range(_NUM_POINTS if symbols else 1)
    ]


def _value(expression: Expr) -> Any:
    """A finite real or complex number of 30 digits; None where there is no such number."""
    value = expression.evalf(_DIGITS)
    if not value.is_number or not value.is_finite or value.has(nan, zoo, oo):
        return None
    real, imaginary = value.as_real_imag()
    return value if real.is_Number and imaginary.is_Number else None


def _close(a: Any, b: Any) -> bool:
    """Equal to 20 digits, or both so small that they may be zero, which has no digits."""
    size = max(abs(a), abs(b))
    return bool(abs(a - b) <= _TOLERANCE * size or size < _SMALL)


def _is_zero(difference: Expr, size: Any) -> bool:
    """Whether a difference of two numbers is zero beside 1 and their size, with the digits that takes: 2^{2005} + 1 is not 2^{2005}."""
    if size == 0:
        return True
    num_digits = abs(int(log(size, 10).evalf(5)))
    if num_digits > _MAX_DIGITS:
        return False
    return bool(abs(difference.evalf(_DIGITS, maxn=2 * _DIGITS + num_digits)) <= _TOLERANCE * min(1, size))
