"""The outcome of asking for a reward: a score, or the reason why it is missing."""

import math
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

import torch

from lockstep.processes.child import describe

_MAX_FLOAT32 = float(torch.finfo(torch.float32).max)
FAILURE_KINDS = ("raised", "timeout", "crashed", "invalid")
"""raised: an exception; timeout: no answer before the deadline; crashed: the process ended; invalid: not a finite number."""
RETRIED_KINDS = ("raised", "timeout", "crashed")
"""Kinds of failures after which reward.retries repeats a call. An invalid result is an answer and is not asked for again."""


@dataclass(frozen=True)
class Score:
    """A finite number, and what else the function returned."""

    value: float
    extra: dict[str, Any] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    """Duration of the call."""
    num_retries: int = field(default=0, compare=False)
    """How often the call was repeated."""


@dataclass(frozen=True)
class Failure:
    """Why a reward is missing."""

    kind: str
    """One of FAILURE_KINDS."""
    text: str
    """What happened, with the function's traceback if there is one."""
    seconds: float = field(default=0.0, compare=False)
    """Duration of the call."""
    num_retries: int = field(default=0, compare=False)
    """How often the call was repeated."""


Outcome = Score | Failure


def check_score(result: Any) -> Outcome:
    """Return the result of a reward function as a Score, or a Failure of kind "invalid" if it is not a finite number."""
    extra: dict[str, Any] = {}
    value = result
    if isinstance(result, dict):
        if "score" not in result:
            return Failure("invalid", f"the reward function returned a dict without 'score': {str(result)[:200]}")
        extra = {str(name): entry for name, entry in result.items() if name != "score"}
        value = result["score"]
    number = value if isinstance(value, int | float) else as_float(value)
    # The reward tensor is float32, where a larger number would become infinite.
    if number is None or not -_MAX_FLOAT32 <= number <= _MAX_FLOAT32:
        text = f"the reward function returned {repr(value)[:200]}, a {type(value).__name__}, which is not a finite number"
        return Failure("invalid", text)
    return Score(float(number), extra)


def as_float(value: Any) -> float | None:
    """Return a Decimal, a fraction, or a single number of NumPy or PyTorch as a float, which may be infinite or NaN; None if the value is
    not a number."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    try:
        return float(value) if isinstance(value, Real | Decimal) else None
    except (OverflowError, ValueError):
        return None


def raised(error: BaseException) -> Failure:
    """Return the failure of a call that raised, without the frame that called it."""
    return Failure("raised", describe(error))
