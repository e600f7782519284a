"""How the named tasks judge a response: strictly, in the form that was asked for, and flexibly, wherever the answer stands.

Each function returns `score` (strict), `flexible`, `formatted` (1 where the form was kept) and, where there is one, the answer that either
read. They run in the reward's worker processes, so this file imports little.
"""

import re
from typing import Any

from lockstep.judging import code, math
from lockstep.rewards.graders import gsm8k as gsm8k_grader

MATH_TIMEOUT_S = 5.0
_STATED = re.compile(r"answer(?:\s+is|\s*:)\s*:?\s*(.+)", re.IGNORECASE)
_IN_DOLLARS = re.compile(r"\$([^$\n]+)\$")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def gsm8k(solution_str: str, ground_truth: str) -> dict[str, Any]:
    """Strict: the number after the last `####`. Flexible: the last number."""
    found: dict[str, Any] = {}
    for name, method in (("strict", "strict"), ("flexible", "flexible")):
        numbers = gsm8k_grader.read_numbers(solution_str, method)
        found |= {name: gsm8k_grader.compute_score(solution_str, ground_truth, method)}
        found |= {f"{name}_pred": str(numbers[0]) if numbers else None}
    return {"score": found["strict"], "formatted": float(found["strict_pred"] is not None), **found}


def competition_math(solution_str: str, ground_truth: str) -> dict[str, Any]:
    r"""Strict: the last \boxed{}. Flexible: that, else what follows the last "answer is", else the last $...$, else the last number."""
    math.check()
    boxed = math.last_boxed(solution_str)
    free = boxed if boxed is not None else _free_answer(solution_str)
    found: dict[str, Any] = {}
    for name, answer in (("strict", boxed), ("flexible", free)):
        right = answer is not None and math.is_same(answer, ground_truth, MATH_TIMEOUT_S)
        found |= {name: float(right), f"{name}_pred": None if answer is None else "".join(answer.split())}
    return {"score": found["strict"], "formatted": float(boxed is not None), **found}


def program(solution_str: str, ground_truth: Any, extra_info: dict[str, Any], sandbox: Any = None) -> dict[str, Any]:
    """Strict: the program in a fenced block (in the plain form: the continuation as it is). Flexible: wherever it is."""
    result = code.compute_score(solution_str, ground_truth, sandbox=sandbox)
    formatted = float(extra_info["is_plain"] or "```" in solution_str)
    strict = result["score"] * formatted
    return {"score": strict, "strict": strict, "flexible": result["score"], "formatted": formatted, "reason": result["reason"]}


def _free_answer(text: str) -> str | None:
    stated = _STATED.findall(text)
    if stated:
        inside = _IN_DOLLARS.findall(stated[-1])
        return inside[0] if inside else stated[-1].strip().rstrip(".")
    found = _IN_DOLLARS.findall(text) or _NUMBER.findall(text)
    return found[-1] if found else None
