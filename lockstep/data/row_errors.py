"""What is wrong with a row, in words."""

from typing import Any

from lockstep.errors import DataError


def wrong_reward_model(data_source: str | None, reward_model: Any) -> DataError:
    """The error about a column `reward_model` that is no struct, or whose weights are none."""
    where = f"(data_source {data_source!r})"
    if not isinstance(reward_model, dict):
        form = 'a struct such as {"style": "rule", "ground_truth": ...}'
        return DataError(f"reward_model must be {form}, not {reward_model!r:.200} {where}")
    return DataError(f"reward_model.weights must map judges to numbers, not {reward_model['weights']!r} {where}")
