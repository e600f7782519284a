"""Tools that ship: Python in the sandbox, and a calculator."""

from __future__ import annotations

import ast
import functools
import math
import operator
from typing import TYPE_CHECKING, Any

from lockstep.agents.tools import ToolError

if TYPE_CHECKING:
    from lockstep.judging import Sandbox

SANDBOX_QUEUE_S = 300.0
"""How long a program may wait for a place in the sandbox, as `Sandbox.queue_s`."""
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_FUNCTIONS: dict[str, Any] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
    "log": math.log,
    "exp": math.exp,
}
_LARGEST = 10**30


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: For example (3 + 4) * 2 / 7. Has + - * / // % **, parentheses, sqrt, abs, round, min, max, log, exp.
    """
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError("the result is not a real number")
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression[:200]!r} cannot be computed: {error}") from error
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base = _value(left)
            exponent = _value(right)
            if abs(exponent) > 100 or abs(base) > 10**6:
                raise ValueError("the power is too large")
            return base**exponent
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(left), _value(right))
            if abs(value) > _LARGEST:
                raise ValueError("the number is too large")
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, arguments))
    raise ValueError("only numbers, + - * / // % **, parentheses and a few functions are known")


def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: The program. Each call is a new program: variables of earlier ones are gone.
    """
    result = _sandbox().run(code)
    if result.status == "ok":
        return result.stdout or "(the program printed nothing)"
    raise ToolError(f"the program ended with {result.status}\n{result.stdout}{result.stderr}".strip())


@functools.cache
def _sandbox() -> Sandbox:
    from lockstep.judging import default_sandbox

    return default_sandbox()
