"""Checks that the sections share, each a ConfigError with the key, the value and the remedy; and the numbers that `auto` stands for."""

import math
import os
from collections.abc import Sequence

from lockstep.errors import ConfigError

AUTO = "auto"
TOKENS, SCORED_TOKENS = 2048, 32768
"""Tokens of a micro-batch where nobody has planned, as on a CPU: of a model that learns, which gains nothing from more there and would
have to recompute what does not fit, and of a reward model, which keeps nothing."""
SEATS, PASS_TOKENS, CACHE_SHARE = 256, 8192, 0.5
"""Of a rollout: sequences at once, tokens of a pass, and the share of the free memory that its cache may take."""


def one_of(key: str, value: object, allowed: Sequence[str]) -> None:
    """`value` must be one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{key}={value} is not known; choose one of: {', '.join(allowed)}", key=key)


def auto_or_bool(section: object, prefix: str, *names: str) -> None:
    """These values of the section, whose keys begin with `prefix`, must be "auto", true or false."""
    for name in names:
        value = getattr(section, name)
        if value != "auto" and not isinstance(value, bool):
            raise ConfigError(f"{prefix}.{name}={value} is not known; choose one of: auto, true, false", key=f"{prefix}.{name}")


def at_least(section: object, prefix: str, least: float, *names: str) -> None:
    """These values of the section, whose keys begin with `prefix`, must be `least` or more; None passes (the key is unset)."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{prefix}.{name}={value} is too small; it must be at least {least}", key=f"{prefix}.{name}")


def above(section: object, prefix: str, bound: float, *names: str) -> None:
    """These values of the section, whose keys begin with `prefix`, must be more than `bound`; None passes (the key is unset)."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not value > bound:
            raise ConfigError(f"{prefix}.{name}={value} is too small; it must be above {bound}", key=f"{prefix}.{name}")


def in_range(section: object, prefix: str, low: float, high: float, *names: str) -> None:
    """These values of the section, whose keys begin with `prefix`, must lie in [low, high]."""
    for name in names:
        value = getattr(section, name)
        if not low <= value <= high:
            raise ConfigError(
                f"{prefix}.{name}={value} is out of range; it must be between {low} and {high}", key=f"{prefix}.{name}"
            )


def all_or_at_least_one(section: object, prefix: str, *names: str) -> None:
    """These values of the section, whose keys begin with `prefix`, must be -1, for all there are, or 1 or more."""
    for name in names:
        value = getattr(section, name)
        if value != -1 and value < 1:
            raise ConfigError(
                f"{prefix}.{name}={value} leaves nothing; set it to -1 for all, or to 1 or more", key=f"{prefix}.{name}"
            )


def file_names(key: str, value: object) -> None:
    """`value` must be the path of a file or a list of such; None passes (the key is unset)."""
    names = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if value is not None and not all(isinstance(name, str | os.PathLike) for name in names):
        raise ConfigError(f"{key}={value} is not a file; name one parquet, json or jsonl file, or a list of them", key=key)


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
            raise ConfigError(f"{prefix}.{name}={value} is not finite; set it to a number", key=f"{prefix}.{name}")


def absolute_reference(text: str) -> str:
    """A reference `path.py:name` with its path made absolute, since workers may run in another folder; other text as it is."""
    path, colon, name = text.rpartition(":")
    return f"{os.path.abspath(os.path.expanduser(path))}:{name}" if colon and path.endswith(".py") else text


def auto_or(value: float | str, otherwise: float) -> float:
    """The number that a key has, or `otherwise` where it is auto."""
    return otherwise if isinstance(value, str) else value


def tokens_in_words(value: int | str) -> str:
    """A number of tokens as a sentence has it."""
    return "as many tokens as the plan chose" if isinstance(value, str) else f"{value} tokens"


def auto_or_at_least(section: object, prefix: str, least: int, *names: str) -> None:
    """These values of the section must be "auto", or `least` or more."""
    for name in names:
        if not _is_auto(section, prefix, name):
            at_least(section, prefix, least, name)


def auto_or_in_range(section: object, prefix: str, low: float, high: float, name: str) -> None:
    """This value of the section must be "auto", or lie in [low, high]."""
    if not _is_auto(section, prefix, name):
        in_range(section, prefix, low, high, name)


def _is_auto(section: object, prefix: str, name: str) -> bool:
    value = getattr(section, name)
    if isinstance(value, str) and value != AUTO:
        raise ConfigError(f"{prefix}.{name}={value} is no number; write a number, or auto", key=f"{prefix}.{name}")
    return value == AUTO
