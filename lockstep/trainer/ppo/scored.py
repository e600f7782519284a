"""Scored: what the judges said of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.rewards.outcome import Failure

OVERLONG_PART = "overlong_penalty"
"""The name of reward.overlong_buffer's penalty among the parts of a reward."""


@dataclass
class Scored:
    """What is known of the rows of a batch beside their scores; each list has one entry per row."""

    failures: list[Failure | None]
    """Why a row's reward is missing."""
    total: list[float]
    """The reward, as the judges gave it; 0 where it is missing."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """What the reward function returned: "score" and its other keys."""
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """Judge -> its score before weighting, None where it was not asked; and the penalty for length, where the run has one."""
    retries: list[int] = field(default_factory=list)
    """How often calls for each row were made again (reward.retries); empty where the reward function does not say."""

    def select(self, rows: Sequence[int]) -> Scored:
        """The same of some rows."""
        extra, parts = ({name: [values[i] for i in rows] for name, values in kind.items()} for kind in (self.extra, self.parts))
        retries = [self.retries[i] for i in rows] if self.retries else []
        return Scored([self.failures[i] for i in rows], [self.total[i] for i in rows], extra, parts, retries)

    @staticmethod
    def concat(all_scored: Sequence[Scored]) -> Scored:
        """The same of several batches, one after the other; None where one lacks a key."""
        joined = Scored([f for scored in all_scored for f in scored.failures], [t for scored in all_scored for t in scored.total])
        if any(scored.retries for scored in all_scored):
            joined.retries = [n for scored in all_scored for n in scored.retries or [0] * len(scored.failures)]
        for kind in ("extra", "parts"):
            for name in dict.fromkeys(name for scored in all_scored for name in getattr(scored, kind)):
                lists = (getattr(scored, kind).get(name, [None] * len(scored.failures)) for scored in all_scored)
                getattr(joined, kind)[name] = [value for values in lists for value in values]
        return joined
