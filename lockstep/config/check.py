"""Checks that the sections share. Each raises ConfigError with the key, what came, and what would do."""

import os
from collections.abc import Sequence

from lockstep.errors import ConfigError


def one_of(key: str, value: object, allowed: Sequence[str]) -> None:
    """`value` must be one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{key}={value} is not known; choose one of: {', '.join(allowed)}")


def auto_or_bool(key: str, value: object) -> None:
    """`value` must be "auto", true or false."""
    if value != "auto" and not isinstance(value, bool):
        raise ConfigError(f"{key}={value} is not known; choose one of: auto, true, false")


def at_least(key: str, value: float | None, least: float) -> None:
    """`value` must be `least` or more; None passes (the key is unset)."""
    if value is not None and not value >= least:
        raise ConfigError(f"{key}={value} is too small; it must be at least {least}")


def in_range(key: str, value: float, low: float, high: float) -> None:
    """`value` must lie in [low, high]."""
    if not low <= value <= high:
        raise ConfigError(f"{key}={value} is out of range; it must be between {low} and {high}")


def absolute_reference(text: str) -> str:
    """A reference `path.py:name` with its path made absolute, since workers may run in another folder; other text as it is."""
    path, colon, name = text.rpartition(":")
    return f"{os.path.abspath(os.path.expanduser(path))}:{name}" if colon and path.endswith(".py") else text
