r"""Answers without a box: competition mathematics as DAPO's data has it, and NuminaMath's as PRIME's. Compared as mathematics."""

import re
from typing import Any

from lockstep.judging import math

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_SAID = re.compile(r"answers?\s*(?::|is|are)\s*:?\s*([^\n]+)", re.IGNORECASE)
_MAX_LINE = 2_000
_MATHS = re.compile(r"\$+(.+?)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]")


def compute_score(solution_str: str, ground_truth: str | int | float) -> dict[str, Any]:
    r"""score 1.0 or -1.0, acc, and pred, the answer that was found ("" without one).

    The last "Answer: ..." counts, of which a \boxed{...} in it; without such a line the last \boxed{...} of the response.
    Raises what `math.compute_score` raises.
    """
    said = _ANSWER.findall(solution_str)
    answer = (_tidy(said[-1]) if said else math.last_boxed(solution_str)) or ""
    is_right = math.compute_score(_boxed(answer), ground_truth) == 1.0
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": answer}


def numina(solution_str: str, ground_truth: str | int | float) -> float:
    r"""1.0 or 0.0 for the last \boxed{...}; without one for the last "answer is ..." or "Answer: ...". Raises as `compute_score` does."""
    said = _SAID.findall(solution_str)
    unboxed = math.last_boxed(solution_str) is None and said
    return math.compute_score(_boxed(_tidy(said[-1])) if unboxed else solution_str, ground_truth)


def _boxed(answer: str) -> str:
    """The answer as `math.compute_score` reads it; nothing where there is none."""
    return f"\\boxed{{{answer}}}" if answer else ""


def _tidy(line: str) -> str:
    """The answer in such a line: what is boxed, or the only mathematics between dollar signs, or all without full stop and emphasis."""
    boxed = math.last_boxed(line)
    maths = _MATHS.findall(line[:_MAX_LINE])
    if boxed is not None:
        return boxed
    return "".join(maths[0]).strip() if len(maths) == 1 else line.strip().strip("*").strip().removesuffix(".").strip()
