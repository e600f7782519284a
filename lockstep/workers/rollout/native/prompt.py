"""Prompt: what samples that start with the same tokens have in common. A record, no code."""

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Prompt:
    """The tokens that some samples start with."""

    ids: list[int]
    num_waiting: int = 0
    """Its samples that are not running."""
    pages: list[int] = field(default_factory=list)
    """Pages that are kept for those."""
    num_kept: int = 0
    """How many tokens these hold."""
