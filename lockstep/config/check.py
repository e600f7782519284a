"""Checks that the sections share. Each raises ConfigError with the key, what came, and what would do."""

import math
import os
from collections.abc import Sequence

from lockstep.errors import ConfigError


def one_of(key: str, value: object, allowed: Sequence[str]) -> None:
    """`value` must be one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{key}={value} is not known; choose one of: {', '.join(allowed)}")


def auto_or_bool(section: object, prefix: str, *names: str) -> None:
    """These values of the section, whose keys begin with `prefix`, must be "auto", true or false."""
    for name in names:
        value = getattr(section, name)
        if value != "auto" and not isinstance(value, bool):
            raise ConfigError(f"{prefix}.{name}={value} is not known; choose one of: auto, true, false")


def at_least(section: object, prefix: str, least: float, *names: str) -> None:
    """These values of the section, whose keys begin with `prefix`, must be `least` or more; None passes (the key is unset)."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{prefix}.{name}={value} is too small; it must be at least {least}")


def above(section: object, prefix: str, bound: float, *names: str) -> None:
    """These values of the section, whose keys begin with `prefix`, must be more than `bound`; None passes (the key is unset)."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not value > bound:
            raise ConfigError(f"{prefix}.{name}={value} is too small; it must be above {bound}")


def in_range(section: object, prefix: str, low: float, high: float, *names: str) -> None:
    """These values of the section, whose keys begin with `prefix`, must lie in [low, high]."""
    for name in names:
        value = getattr(section, name)
        if not low <= value <= high:
            raise ConfigError(f"{prefix}.{name}={value} is out of range; it must be between {low} and {high}")


def all_or_at_least_one(section: object, prefix: str, *names: str) -> None:
    """These values of the section, whose keys begin with `prefix`, must be -1, for all there are, or 1 or more."""
    for name in names:
        value = getattr(section, name)
        if value != -1 and value < 1:
            raise ConfigError(f"{prefix}.{name}={value} leaves nothing; set it to -1 for all, or to 1 or more")


def file_names(key: str, value: object) -> None:
    """`value` must be the path of a file or a list of such; None passes (the key is unset)."""
    names = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if value is not None and not all(isinstance(name, str | os.PathLike) for name in names):
        raise ConfigError(f"{key}={value} is not a file; name one parquet, json or jsonl file, or a list of them")


def at_home(section: object, *names: str) -> None:
    """Write the home folder for `~` at the start of these paths of the section, or lists of paths."""
    for name in names:
        value = getattr(section, name)
        if isinstance(value, str):
            setattr(section, name, os.path.expanduser(value))
        elif isinstance(value, list):
            setattr(section, name, [os.path.expanduser(entry) if isinstance(entry, str) else entry for entry in value])


def finite(section: object, prefix: str, *names: str) -> None:
    """These values of the section must be finite: what is multiplied or divided by them would not be. None passes (the key is unset)."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{prefix}.{name}={value} is not finite; set it to a number")


def absolute_reference(text: str) -> str:
    """A reference `path.py:name` with its path made absolute, since workers may run in another folder; other text as it is."""
    path, colon, name = text.rpartition(":")
    return f"{os.path.abspath(os.path.expanduser(path))}:{name}" if colon and path.endswith(".py") else text
