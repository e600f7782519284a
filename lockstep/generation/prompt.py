"""Prompt: what samples that start with the same tokens have in common. A record, no code."""

from dataclasses import dataclass, field
from typing import Any


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
    known: Any = None
    """Up to where the prefix cache is known to have its tokens (a Node)."""
