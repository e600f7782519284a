"""Numbers that the plan chooses where a key says `auto` (planner/choices.py), and what they are where nobody has planned."""

from lockstep.config.check import at_least, in_range
from lockstep.errors import ConfigError

AUTO = "auto"
TOKENS, SCORED_TOKENS = 2048, 32768
"""Tokens of a micro-batch where nobody has planned, as on a CPU: of a model that learns, which gains nothing from more there and would
have to recompute what does not fit, and of a reward model, which keeps nothing."""
SEATS, PASS_TOKENS, CACHE_SHARE = 256, 8192, 0.5
"""Of a rollout: sequences at once, tokens of a pass, and the share of the free memory that its cache may take."""


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
        raise ConfigError(f"{prefix}.{name}={value} is no number; write a number, or auto")
    return value == AUTO
