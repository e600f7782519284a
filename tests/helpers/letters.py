"""A reward that a model which can do nothing gets more or less of; alone in its file, which another process then reads quickly."""

from typing import Any


def num_letters(solution_str: str, **row: Any) -> float:
    """How many different letters a response has, of twelve."""
    return len(set(solution_str)) / 12
