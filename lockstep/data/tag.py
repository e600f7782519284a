"""Tag: what a row of data says about its reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import DataError


@dataclass(frozen=True)
class Tag:
    """What a row says about its reward."""

    data_source: str | None
    style: str | None = None
    """reward_model.style."""
    has_test_cases: bool = False
    """Whether it has reward_model.test_cases."""
    weights: tuple[tuple[str, float], ...] = ()
    """reward_model.weights, by name: files do not keep their order."""
    has_truth: bool = True
    """Whether it has reward_model.ground_truth."""

    @classmethod
    def of(cls, data_source: str | None, reward_model: Mapping[str, Any] | None) -> Tag:
        """The tag of a row with these two columns. Weights that are None are those of other rows of the same file."""
        reward_model = {} if reward_model is None else reward_model
        weights = (reward_model.get("weights") or {}) if isinstance(reward_model, Mapping) else None
        if not isinstance(weights, Mapping):
            raise wrong_reward_model(data_source, reward_model)
        given = tuple(sorted((str(name), float(weight)) for name, weight in weights.items() if weight is not None))
        has_cases, has_truth = (reward_model.get(name) is not None for name in ("test_cases", "ground_truth"))
        return cls(data_source, reward_model.get("style"), has_cases, given, has_truth)


def wrong_reward_model(data_source: str | None, reward_model: Any) -> DataError:
    """Return the error about a column `reward_model` that is not a struct, or whose weights are not a mapping."""
    where = f"(data_source {data_source!r})"
    if not isinstance(reward_model, dict):
        form = 'a struct such as {"style": "rule", "ground_truth": ...}'
        return DataError(f"reward_model must be {form}, not {reward_model!r:.200} {where}")
    return DataError(f"reward_model.weights must map judges to numbers, not {reward_model['weights']!r} {where}")
