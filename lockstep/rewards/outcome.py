"""What became of the question for a reward: a score, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FAILURE_KINDS = ("raised", "timeout", "crashed", "invalid")
"""raised: an exception; timeout: no answer before the deadline; crashed: its process ended; invalid: not a finite number."""


@dataclass(frozen=True, slots=True)
class Score:
    """A finite number, and what else the function returned."""

    value: float
    extra: dict[str, Any] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    """How long the call took."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a reward is missing."""

    kind: str
    """One of FAILURE_KINDS."""
    text: str
    """What happened, with the function's own traceback where there is one."""
    seconds: float = field(default=0.0, compare=False)
    """How long the call took."""


Outcome = Score | Failure
