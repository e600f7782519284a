r"""Geometry3K, its text: nine tenths for the last \boxed{...}, one tenth for <think>...</think> before it."""

import re
from typing import Any

from lockstep.judging import math

_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
    """score, acc and format. Raises what `math.compute_score` raises."""
    acc = math.compute_score(solution_str, ground_truth)
    has_format = _FORMAT.fullmatch(solution_str) is not None
    return {"score": 0.9 * acc + 0.1 * has_format, "acc": acc == 1.0, "format": has_format}
