"""GSM8K: the number after `####` (strict), or the last number of the text (flexible), compared as a number."""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal, InvalidOperation

from lockstep.errors import DataError

# Digits with or without thousands commas, then a fraction. A full stop after the number is not part of it.
_MAGNITUDE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# What follows must not continue the number, as in 3/4, 1.2.3 or 12,5: that is no answer rather than its first part.
# Possessive quantifiers (*+, ?+): a long run of blanks is looked at once.
_STRICT = re.compile(rf"####[ \t]*+([-+]?+)[ \t]*+(?:\$[ \t]*+([-+]?+))?+({_MAGNITUDE})(?![.,/]?[0-9])")
# The minus of 10-5 is an operator, not a sign. No condition on what follows, so every digit is looked at once.
_FLEXIBLE = re.compile(rf"(?:(?<![\w)])([-+]))?(?:\$([-+]?))?({_MAGNITUDE})")


def compute_score(
    solution_str: str,
    ground_truth: str | int | float,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right number, `format_score` for another number, 0.0 where there is none.

    "strict" takes the last `####` that a number follows (spaces, `$`, thousands commas and a final full stop are
    allowed); "flexible" takes the last number of the text. 42, 42.0 and $42. are the same number. Raises DataError
    when `ground_truth` is not a number and ValueError for another method.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be 'strict' or 'flexible', not {method!r}")
    expected = _ground_truth_number(ground_truth)
    answer = _last_number(solution_str, _STRICT if method == "strict" else _FLEXIBLE)
    if answer is None:
        return 0.0
    return score if answer == expected else format_score


def _last_number(text: str, pattern: re.Pattern[str]) -> Decimal | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    if not matches:
        return None
    outer, inner, magnitude = matches[0].groups(default="")
    number = Decimal(magnitude.replace(",", ""))
    # copy_negate is exact; unary minus would round to the context's precision.
    return number.copy_negate() if (outer == "-") != (inner == "-") else number


def _ground_truth_number(ground_truth: str | int | float) -> Decimal:
    try:
        number = Decimal(str(ground_truth).replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite():
        raise DataError(f"the ground truth of a GSM8K row must be a number, not {ground_truth!r}")
    return number
