r"""Competition mathematics as DAPO's data has it: the last line "Answer: ...", or else the last \boxed{...}, compared as mathematics."""

import re
from typing import Any

from lockstep.rewards.graders import math

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def compute_score(solution_str: str, ground_truth: str | int | float) -> dict[str, Any]:
    r"""score 1.0 or -1.0, acc, and pred, the answer that was found ("" without one).

    The last "Answer: ..." counts, of which a \boxed{...} in it; without such a line the last \boxed{...} of the response.
    Raises what `math.compute_score` raises.
    """
    said = _ANSWER.findall(solution_str)
    answer = _tidy(said[-1]) if said else math.last_boxed(solution_str)
    is_right = math.compute_score(f"\\boxed{{{answer}}}", ground_truth) == 1.0 if answer else False
    if not answer:
        math.compute_score("", ground_truth)  # a row without a ground truth is a fault of the data, whatever the response
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": answer or ""}


def _tidy(line: str) -> str:
    """The answer in such a line: what is boxed or between dollar signs, without a full stop and emphasis around it."""
    boxed = math.last_boxed(line)
    if boxed is not None:
        return boxed
    line = line.strip().strip("*").strip()
    between = re.fullmatch(r"\$+(.+?)\$+\.?", line)
    return (between.group(1) if between else line.removesuffix(".")).strip()
