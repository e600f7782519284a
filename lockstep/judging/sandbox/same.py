"""When two outputs, or two values, are the same. Without imports of ours: it is sent into sandboxes in front of judge.py."""

from __future__ import annotations

# Starting must be quick: typing would cost as much as everything else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LARGEST_FLOAT = 1.7976931348623157e308


def same_output(got: str, expected: str) -> bool:
    """Whether both have the same words; white space between them does not matter. Where a decimal fraction (1.5, 2e-3) is expected, a
    number is right when it differs by at most 1e-6, absolute or relative.
    """
    ours = got.split()
    theirs = expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if expected.lstrip("+-").isdigit() or not set(got + expected) <= set("0123456789+-.eE"):
        return False
    try:
        number = float(got)
        wanted = float(expected)
    except ValueError:
        return False
    return _near(number, wanted)


def same_value(got: Any, expected: Any) -> bool:
    """Whether a function returned what is expected: equal, where a tuple is as good as a list, and floats may differ by 1e-6. The
    expected value may stand in a list of its own, as in APPS.
    """
    return _close(got, expected) or (isinstance(expected, list) and len(expected) == 1 and _close(got, expected[0]))


def _close(got: Any, expected: Any) -> bool:
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(_close, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(_close(got[key], expected[key]) for key in got)
    if isinstance(got, float) or isinstance(expected, float):
        is_number = isinstance(got, int | float) and isinstance(expected, int | float)
        return is_number and _near(got, expected)
    return type(got) is type(expected) and bool(got == expected)


def _near(got: float, expected: float) -> bool:
    """Within 1e-6, absolute or relative. Near infinity is infinity alone, and near nan is nan."""
    if not (abs(got) <= _LARGEST_FLOAT and abs(expected) <= _LARGEST_FLOAT):
        return got == expected or (got != got and expected != expected)
    return abs(got - expected) <= 1e-6 * max(1.0, abs(expected))
