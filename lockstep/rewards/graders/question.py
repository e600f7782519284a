"""Open questions, as Search-R1's data has them: the last <answer>...</answer> is one of the right answers, in SQuAD's normal form."""

import re
import string
from collections.abc import Mapping
from typing import Any

from lockstep.errors import DataError

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MAX_TAGS = 10


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """score 1.0 or 0.0, a quarter of it where a response tries more than ten answers; acc and pred.

    The ground truth is {"target": answer or list of answers}, or these without the dict. Raises DataError when there is none.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    targets = [target] if isinstance(target, str) else [] if target is None else [str(answer) for answer in target]
    if not targets:
        raise DataError(f"a question needs its answers in reward_model.ground_truth['target'], not {ground_truth!r}")
    found = _ANSWER.findall(solution_str)
    pred = found[-1].strip() if found else ""
    is_right = bool(found) and _normal(pred) in map(_normal, targets)
    tries = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return {"score": is_right * (0.25 if tries > _MAX_TAGS else 1.0), "acc": is_right, "pred": pred}


def _normal(text: str) -> str:
    """Lower case, without punctuation, articles and more than single spaces."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())
