r"""MATH: the content of the last \boxed{...}, compared as a string after writing both sides the same way.

The normal form follows the habits of Hendrycks et al. (2021), "Measuring Mathematical Problem Solving": one spelling
for fractions, roots and decimals, no units and no layout commands. Answers that are equal in value but not in form
(2/4 and 1/2) stay different.
"""

from __future__ import annotations

import re
from collections import deque

from lockstep.errors import DataError

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_FRACTION_OR_ROOT = re.compile(r"\\(frac|sqrt)(?![a-zA-Z])")
_ARGUMENT = re.compile(r"\s*(\\[a-zA-Z]+|[^\s}\\])")
_TEXT = r"\\(?:text|textbf|mbox|mathrm)\s*\{([^{}]*)\}"

# Applied in this order.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|\u00b0", ""),
        (r"\\?[$%]", ""),
        (r"(?<!\\)\\[!,;: ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\{,\}", ","),
        # A text behind a value is its unit, with or without a power; any other text counts as what it says.
        (rf"(?<=[0-9a-zA-Z)}}])\s*{_TEXT}\s*(?:\^\s*(?:[0-9]|\{{[0-9]\}}))?\s*\Z", ""),
        (_TEXT, r"\1"),
    )
]
_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_SLASHED = re.compile(r"(-?)([0-9]+)/([0-9]+)")


def compute_score(solution_str: str, ground_truth: str) -> float:
    r"""1.0 when the last \boxed{...} (or \fbox{...}, or `\boxed 5`) equals the ground truth in normal form, else 0.0.

    The ground truth is the answer itself, without a box. Raises DataError when it is empty or missing.
    """
    if ground_truth is None or not str(ground_truth).strip():
        raise DataError(f"a MATH row needs its answer in reward_model.ground_truth, not {ground_truth!r}")
    answer = last_boxed(solution_str)
    return float(answer is not None and normalize(answer) == normalize(str(ground_truth)))


def last_boxed(text: str) -> str | None:
    r"""The content of the last box; None where there is none or its brace is never closed. `\boxed 5` ends at `$` or
    the line's end.
    """
    matches = deque(_BOX.finditer(text), maxlen=1)
    if not matches:
        return None
    rest = text[matches[0].end() :].lstrip()
    if not rest.startswith("{"):
        return re.split(r"[$\n]", rest, maxsplit=1)[0].strip() or None
    end = _closing_braces(rest).get(0)
    return None if end is None else rest[1:end]


def normalize(answer: str) -> str:
    """The answer in normal form; two answers are the same when these strings are equal."""
    answer = answer.strip().rstrip(".")
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = re.sub(r"\s", "", _brace_arguments(answer)).rstrip(".")
    left, equals, right = answer.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        answer = right
    if _THOUSANDS.fullmatch(answer):
        answer = answer.replace(",", "")
    answer = re.sub(r"(?<![0-9])\.(?=[0-9])", "0.", answer)
    answer = re.sub(r"(?<![0-9.,])0+(?=[0-9])", "", answer)
    if answer == "0.5":
        return r"\frac{1}{2}"
    slashed = _SLASHED.fullmatch(answer)
    return rf"{slashed[1]}\frac{{{slashed[2]}}}{{{slashed[3]}}}" if slashed else answer


def _brace_arguments(text: str) -> str:
    r"""Write \frac12 as \frac{1}{2} and \sqrt2 as \sqrt{2}; works at any depth, in one pass."""
    closing = _closing_braces(text)
    braces: list[tuple[int, str]] = []
    for command in _FRACTION_OR_ROOT.finditer(text):
        position = command.end()
        if text.startswith("[", position):  # the degree of a root: \sqrt[3]2 stays as it is
            continue
        for _ in range(2 if command[1] == "frac" else 1):
            argument = _ARGUMENT.match(text, position)
            if argument is None:
                break
            if argument[1] == "{":
                if argument.start(1) not in closing:
                    break
                position = closing[argument.start(1)] + 1
            else:
                braces += [(argument.start(1), "{"), (argument.end(1), "}")]
                position = argument.end()
    pieces, done = [], 0
    for position, brace in sorted(braces, key=lambda b: b[0]):
        pieces += [text[done:position], brace]
        done = position
    return "".join(pieces) + text[done:]


def _closing_braces(text: str) -> dict[int, int]:
    r"""Position of each opening brace that is closed -> position of its closing brace; \{ and \} are characters."""
    closing, opened = {}, []
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if token[0] == "{":
            opened.append(token.start())
        elif token[0] == "}" and opened:
            closing[opened.pop()] = token.start()
    return closing
