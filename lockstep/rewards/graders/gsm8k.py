"""GSM8K: the number after the last `####` (strict), or the last number of the text (flexible), compared as a number.

docs/rewards.md lists what counts as the number after `####`. So that the time is bounded whatever the response is, strict looks at the
last 100 `####` and 1,000 characters after each, flexible at the last 10,000 characters, and a number has at most 200 characters.
"""

import re
from collections import deque
from fractions import Fraction

from lockstep.errors import DataError
from lockstep.utils.characters import to_ascii

_MAX_MARKS = 100
_MAX_AFTER_MARK = 1_000
_MAX_TAIL = 10_000
_MAX_NUMBER = 200

# Digits with or without thousands commas, then a fraction. A full stop after the number is not part of it.
_MAGNITUDE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"

_MARK = re.compile(r"#{4,}")
# Words may stand between `####` and the number when one of these closes them: "Answer:", "x =", "The answer is".
_LABEL_END = re.compile(r"=|(?<![0-9]):|:(?![0-9])|\b(?:is|are)\b")
_DECORATION = (
    r"(?:[\s*_`~$£€¥₹(\[{<\"'≈]|\\(?:boxed|fbox|text|textbf|mathbf|mathrm|approx)(?![a-z])|\\[$(\[ ,]"
    r"|(?:USD?|EUR|GBP|Rs\.?)(?=[\s$]))*+"
)
_NUMBER = re.compile(
    rf"{_DECORATION}([-+]?){_DECORATION}([-+]?)"
    rf"(?:(?:(?P<whole>[0-9]+) +)?(?P<top>[0-9]+)/(?P<bottom>[0-9]+)"
    rf"|(?P<spaced>[0-9]{{1,3}}(?: [0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?)|(?P<plain>{_MAGNITUDE}))"
    rf"(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}}))?(?![eE]?[0-9])(?: +(?P<scale>thousand|million|billion)\b)?"
)
# What makes a number a part of something else: 1.2.3, 12,5, 10:30, 5 - 3, 5 or 6, 1 hour 30 minutes, 2x.
_CONTINUES = re.compile(
    r"[.,/:^][0-9]|[xyzn](?![a-z])"
    r"|[ ]*[0-9]|\s*(?:[-+*/x\u00d7\u00f7=^,;&]|\\times|\\cdot|\\div|\b(?:or|and|to)\b)\s*[-$£€(\\]*[0-9]|[ ]+[a-z]+[ ]+(?:and[ ]+)?[0-9]"
)
_LIST_ITEM = re.compile(r"[.)]\s*\S")
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}

# The minus of 10-5 is an operator, not a sign.
_LAST = re.compile(rf"(?:(?<![\w)])([-+]))?(?:\$([-+]?))?({_MAGNITUDE})(?:/([0-9]+))?")
_GROUND_TRUTH = re.compile(rf"([-+]?)\$?({_MAGNITUDE})(?:[eE]([-+]?[0-9]{{1,3}}))?")

_FRACTION_SIGNS = {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3"}
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([0-9]+)\}\s*\{([0-9]+)\}")


def compute_score(
    solution_str: str,
    ground_truth: str | int | float,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right number, `format_score` for another number, 0.0 where there is none.

    "strict" takes the last `####` that a number follows; "flexible" takes the last number of the text. 42, 42.0, $42. and 84/2 are the
    same number. Raises DataError when `ground_truth` is not a number and ValueError for another method.
    """
    expected = _ground_truth_number(ground_truth)
    readings = read_numbers(solution_str, method)
    if not readings:
        return 0.0
    return score if expected in readings else format_score


def read_numbers(solution_str: str, method: str) -> tuple[Fraction, ...]:
    """What the number that `compute_score` judges can mean; empty where there is none. Raises ValueError for another method."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be 'strict' or 'flexible', not {method!r}")
    return _number_after_mark(solution_str) if method == "strict" else _last_number(solution_str)


def _number_after_mark(text: str) -> tuple[Fraction, ...]:
    """What the number after the last `####` that has one can mean: 2 million is 2,000,000, or 2 where the question counts millions."""
    for mark in reversed(deque(_MARK.finditer(text), maxlen=_MAX_MARKS)):
        after = text[mark.end() : mark.end() + _MAX_AFTER_MARK]
        line = after.lstrip()
        is_below = "\n" in after[: len(after) - len(line)]
        readings = _first_number(_tidy(line.split("\n", 1)[0]), is_below)
        if readings:
            return readings
    return ()


def _first_number(line: str, is_below: bool) -> tuple[Fraction, ...]:
    """The number that the line begins with, or the first that a label is followed by. A line below the mark may have no label."""
    starts = [0] if is_below else [0, *(label.end() for label in _LABEL_END.finditer(line))]
    for start in starts:
        number = _NUMBER.match(line, start)
        if number is None or len(number[0]) > _MAX_NUMBER or _CONTINUES.match(line, number.end()):
            continue
        if is_below and _LIST_ITEM.match(line, number.end()):
            continue
        value = _value(number)
        if value is not None:
            return (value, value * _SCALES[number["scale"]]) if number["scale"] else (value,)
    return ()


def _value(number: re.Match[str]) -> Fraction | None:
    """None for a division by zero."""
    if number["bottom"]:
        if not int(number["bottom"]):
            return None
        value = int(number["whole"] or 0) + Fraction(int(number["top"]), int(number["bottom"]))
    else:
        value = Fraction(re.sub("[, ]", "", number["plain"] or number["spaced"]))
    value *= Fraction(10) ** int(number["exponent"] or 0)
    return -value if (number[1] == "-") != (number[2] == "-") else value


def _tidy(line: str) -> str:
    line = to_ascii(line)
    for sign, spelled in _FRACTION_SIGNS.items():
        line = line.replace(sign, spelled)
    line = line.replace("{,}", ",").replace(r",\!", ",").replace(r"\,", " ")
    return _LATEX_FRACTION.sub(r" \1/\2", line)


def _last_number(text: str) -> tuple[Fraction, ...]:
    matches = deque(_LAST.finditer(to_ascii(text[-_MAX_TAIL:])), maxlen=1)
    if not matches or len(matches[0][0]) > _MAX_NUMBER:
        return ()
    outer, inner, magnitude, bottom = matches[0].groups(default="")
    value = Fraction(magnitude.replace(",", ""))
    if bottom and int(bottom):
        value /= int(bottom)
    return (-value if (outer == "-") != (inner == "-") else value,)


def _ground_truth_number(ground_truth: str | int | float) -> Fraction:
    match = _GROUND_TRUTH.fullmatch(str(ground_truth).strip())
    if match is None or len(match[0]) > _MAX_NUMBER:
        raise DataError(f"the ground truth of a GSM8K row must be a number, not {ground_truth!r}")
    sign, magnitude, exponent = match.groups(default="")
    value = Fraction(magnitude.replace(",", "")) * Fraction(10) ** int(exponent or 0)
    return -value if sign == "-" else value
