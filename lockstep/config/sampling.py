"""How tokens are drawn: the keys with their defaults and checks, and what is asked of the generation engines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockstep.config.check import at_least, finite, in_range
from lockstep.errors import ConfigError


@dataclass
class SamplingConfig:
    """How tokens are drawn."""

    prefix: ClassVar[str] = "sampling"
    """What stands before the names in errors."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that hold this much probability."""
    min_p: float = 0.0
    """Keep the tokens with at least this share of the most likely one's probability."""
    repetition_penalty: float = 1.0
    """Makes tokens that the prompt or the response already has less likely (above 1)."""
    n: int = 1
    """Samples per prompt."""

    def __post_init__(self) -> None:
        check_sampling(self.prefix, self, "n")

    def params(
        self,
        *,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        seed: int,
        stop: Sequence[str] = (),
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
    ) -> SamplingParams:
        """Return what an engine is asked for. Raises ConfigError, naming the parameter, when one is out of range."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            stop=tuple(stop),
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a call, or of one request, are drawn. Raises ConfigError, naming the parameter, when one is out of range."""

    temperature: float
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = SamplingConfig.top_k
    """Keep the k most likely tokens, and those as likely as the last of them; -1 keeps all."""
    top_p: float = SamplingConfig.top_p
    """Keep the most likely tokens that hold this much probability, and those as likely as the last of them; 1 keeps all."""
    min_p: float = SamplingConfig.min_p
    """Keep the tokens that have at least this share of the most likely one's probability; 0 keeps all."""
    repetition_penalty: float = SamplingConfig.repetition_penalty
    """Divides the positive logits, and multiplies the negative ones, of tokens that the prompt or the response has; 1 does nothing."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the response has."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token once for each time that the response has it."""
    max_tokens: int
    """Longest response."""
    stop_token_ids: tuple[int, ...]
    """A response ends after one of these."""
    stop: tuple[str, ...] = ()
    """A response ends after the token that completes one of these strings."""
    seed: int
    """The run's seed."""
    truncates: bool = field(init=False)
    """Whether some tokens cannot be drawn."""
    penalises: bool = field(init=False)
    """Whether what was said before changes what is drawn."""

    def __post_init__(self) -> None:
        check_sampling("sampling", self, "max_tokens")
        check_stop("sampling", self.stop)
        in_range(self, "sampling", -100.0, 100.0, "presence_penalty", "frequency_penalty")
        object.__setattr__(self, "truncates", self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
        penalises = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        object.__setattr__(self, "penalises", penalises)


def check_stop(prefix: str, stop: Sequence[str]) -> None:
    """Raise ConfigError, with `prefix` before the name, when one of the strings is empty."""
    if "" in stop:
        raise ConfigError(
            f"{prefix}.stop={list(stop)} has an empty string, which every response ends with; leave it out", key=f"{prefix}.stop"
        )


def check_line_breaks(name: str, stop: Sequence[str]) -> None:
    """Raise ConfigError for a string with a backslash and an n: a command line makes no line break of them, so it would end nothing."""
    if found := [text for text in stop if re.search(r"\\[nrt](?![a-z])", text)]:
        raise ConfigError(
            f"{name} has {found[0]}, with a backslash and a letter as they are, which a model hardly writes; a line break is $'...\\n...' "
            'around the whole word in a shell, and "\\n" in double quotes in a YAML file',
            key=name,
        )


def check_sampling(prefix: str, section: Any, *counts: str) -> None:
    """Raise ConfigError for the first value that cannot be sampled with; `prefix` stands before its name. `counts` must be 1 or more."""
    finite(section, prefix, "temperature")
    at_least(section, prefix, 0.0, "temperature")
    in_range(section, prefix, 0.0, 1.0, "top_p", "min_p")
    in_range(section, prefix, 1e-4, 1e4, "repetition_penalty")
    at_least(section, prefix, 1, *counts, *(() if section.top_k == -1 else ("top_k",)))
