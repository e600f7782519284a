"""What became of the question for a reward: a score, or the reason why there is none."""

from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.processes.child import describe
from lockstep.rewards.as_float import as_float

_MAX_FLOAT32 = float(torch.finfo(torch.float32).max)
FAILURE_KINDS = ("raised", "timeout", "crashed", "invalid")
"""raised: an exception; timeout: no answer before the deadline; crashed: its process ended; invalid: not a finite number."""
TRIED_AGAIN = ("raised", "timeout", "crashed")
"""Kinds of failures after which reward.retries makes a call again: the function that returned something has answered."""


@dataclass(frozen=True)
class Score:
    """A finite number, and what else the function returned."""

    value: float
    extra: dict[str, Any] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    """How long the call took."""
    num_retries: int = field(default=0, compare=False)
    """How often the call was made again."""


@dataclass(frozen=True)
class Failure:
    """Why a reward is missing."""

    kind: str
    """One of FAILURE_KINDS."""
    text: str
    """What happened, with the function's own traceback where there is one."""
    seconds: float = field(default=0.0, compare=False)
    """How long the call took."""
    num_retries: int = field(default=0, compare=False)
    """How often the call was made again."""


Outcome = Score | Failure


def check_score(result: Any) -> Outcome:
    """What a reward function returned, as a Score; a Failure of kind "invalid" when it is not a finite number."""
    extra: dict[str, Any] = {}
    value = result
    if isinstance(result, dict):
        if "score" not in result:
            return Failure("invalid", f"the reward function returned a dict without 'score': {str(result)[:200]}")
        extra = {str(name): v for name, v in result.items() if name != "score"}
        value = result["score"]
    number = value if isinstance(value, int | float) else as_float(value)
    # The reward tensor is float32, where a larger number would become infinite.
    if number is None or not -_MAX_FLOAT32 <= number <= _MAX_FLOAT32:
        text = f"the reward function returned {repr(value)[:200]}, a {type(value).__name__}, which is not a finite number"
        return Failure("invalid", text)
    return Score(float(number), extra)


def raised(error: BaseException) -> Failure:
    """The failure of a call that raised, without the frame that called it."""
    return Failure("raised", describe(error))
