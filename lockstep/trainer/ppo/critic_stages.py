"""The stages of a step that only a run with a critic has; see stages.py."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.observability.metrics import Metric, average_updates, merge_metrics
from lockstep.protocol import DataProto
from lockstep.trainer.ppo.resolved import Estimation
from lockstep.trainer.ppo.stages import check_finite, denominators_of, token_columns


def values(critic: Any, batch: DataProto) -> None:
    """Reads prompts, responses. Writes values."""
    batch.union(critic.compute_values(batch.select(token_columns(batch), [])))
    check_finite(batch, "values")


def update_critic(critic: Any, batch: DataProto, mini_batches: Sequence[Tensor]) -> dict[str, float]:
    """Reads values, returns. One optimizer step for each of `mini_batches` (row numbers)."""
    data = batch.select([*token_columns(batch), "response_mask", "values", "returns"], ["index"])
    updates: list[dict[str, Metric]] = []
    for rows in mini_batches:
        mini_batch = data.select_idxs(rows)
        updates.append(merge_metrics(critic.update_critic(mini_batch, denominators=denominators_of(mini_batch))))
    return average_updates(updates)


def learn_values(critic: Any, batch: DataProto, estimation: Estimation) -> dict[str, float]:
    """Reads token_level_rewards. Writes values. The critic's only update of this batch: its own forward pass gives the values, and with
    them the returns (`Estimation.of_values`)."""
    data = batch.select([*token_columns(batch), "response_mask", "token_level_rewards"], ["index"])
    found = critic.learn_values(data, denominators=denominators_of(data), discounts=estimation.of_values)
    metrics = found.meta_info.pop("metrics")
    batch.union(found)
    check_finite(batch, "values")
    ranks = [{name: metric} for name, each in metrics.items() for metric in (each if isinstance(each, list) else [each])]
    return average_updates([merge_metrics(ranks)])
