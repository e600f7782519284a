"""Metrics that know how to reduce.

Code that measures something says with the kind how it adds up: `{"actor/pg_loss": Mean(loss_sum, num_tokens)}`. The
kind decides the reduction, never the name.

```text
micro-batches and ranks --merge_metrics--> one optimizer step --average_updates--> one training step (floats)
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

MACHINE_METRICS = ("time", "timing", "perf/", "memory/", "agent/environment_s", "agent/wait")
"""How metrics begin that differ between any two runs: times and memory."""
RANK_METRICS = ("global_seqlen/",)
"""How metrics begin that depend on the number of ranks."""


class _Kind:
    """What all kinds share."""

    __slots__ = ()

    def merge(self, other: Metric) -> Self:
        """Both parts together. Raises TypeError on another kind."""
        if type(other) is not type(self):
            raise _kinds_differ(self, other)
        return self._with(other)

    def _with(self, other: Any) -> Self:
        raise NotImplementedError


@dataclass(frozen=True)
class Mean(_Kind):
    """A weighted mean: `total` is the weighted sum of what was measured, `weight` the sum of weights (tokens, rows).

    Merging adds both, so the mean does not depend on how the rows were cut into parts.
    """

    total: float
    weight: float = 1.0

    def _with(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        """total / weight; nan when nothing was measured (weight 0)."""
        return self.total / self.weight if self.weight else math.nan


@dataclass(frozen=True)
class Sum(_Kind):
    """A count or another amount that adds up."""

    value: float

    def _with(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True)
class Max(_Kind):
    """The largest of what was measured. A nan stays: it is never hidden behind a larger number."""

    value: float

    def _with(self, other: Max) -> Max:
        return Max(max(self.value, other.value, key=lambda value: (math.isnan(value), value)))


@dataclass(frozen=True)
class Min(_Kind):
    """The smallest of what was measured. A nan stays: it is never hidden behind a smaller number."""

    value: float

    def _with(self, other: Min) -> Min:
        return Min(min(self.value, other.value, key=lambda value: (not math.isnan(value), value)))


Metric = Mean | Sum | Max | Min
Metrics = Mapping[str, Metric]


def merge_metrics(parts: Sequence[Metrics]) -> dict[str, Metric]:
    """What the micro-batches and data-parallel ranks of one optimizer step add up to.

    A metric may be missing in some parts. Raises TypeError when a name has different kinds in different parts.
    """
    return {name: reduce(_merge, found) for name, found in _by_name(parts).items()}


def average_updates(updates: Sequence[Metrics]) -> dict[str, float]:
    """One number a metric for a training step that made several optimizer steps.

    Max gives the largest and Min the smallest value; Mean and Sum the arithmetic mean of their values, every update
    counting the same. A Mean of weight 0 measured nothing and is left out, the metric too when no update measured it. A
    metric may be missing in some updates. Raises TypeError when a name has different kinds in different updates.
    """
    measured = ({name: metric for name, metric in update.items() if _is_measured(metric)} for update in updates)
    return {name: _over_updates(found) for name, found in _by_name(list(measured)).items()}


def values(metrics: Metrics) -> dict[str, float]:
    """The number that each metric stands for; what was not measured has none and is left out."""
    return {name: metric.value for name, metric in metrics.items() if _is_measured(metric)}


def _by_name(parts: Sequence[Metrics]) -> dict[str, list[Metric]]:
    found: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            same_name = found.setdefault(name, [])
            if same_name and type(same_name[0]) is not type(metric):
                raise TypeError(f"metric {name!r}: {_kinds_differ(same_name[0], metric)}")
            same_name.append(metric)
    return found


def _is_measured(metric: Metric) -> bool:
    return not (isinstance(metric, Mean) and metric.weight == 0)


def _merge(a: Metric, b: Metric) -> Metric:
    return a.merge(b)


def _over_updates(found: list[Metric]) -> float:
    if isinstance(found[0], Max | Min):
        return reduce(_merge, found).value
    return sum(metric.value for metric in found) / len(found)


def _kinds_differ(a: object, b: object) -> TypeError:
    kinds = f"a {type(a).__name__} with a {type(b).__name__}"
    return TypeError(f"cannot merge {kinds}: a metric has the same kind wherever it is measured")
