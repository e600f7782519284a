"""Metrics that know how to reduce.

Code that measures something says with the kind how it adds up: `{"actor/pg_loss": Mean(loss_sum, num_tokens)}`. The
kind decides the reduction, never the name.

```text
micro-batches and ranks --merge_metrics--> one optimizer step --average_updates--> one training step (floats)
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean: `total` is the weighted sum of what was measured, `weight` the sum of weights (tokens, rows).

    Merging adds both, so the mean does not depend on how the rows were cut into parts.
    """

    total: float
    weight: float = 1.0

    def merge(self, other: Metric) -> Mean:
        """The mean over both parts. Raises TypeError on another kind."""
        if not isinstance(other, Mean):
            raise _kinds_differ(self, other)
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        """total / weight; nan when nothing was measured (weight 0)."""
        return self.total / self.weight if self.weight else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or another amount that adds up."""

    total: float

    def merge(self, other: Metric) -> Sum:
        """The sum of both parts. Raises TypeError on another kind."""
        if not isinstance(other, Sum):
            raise _kinds_differ(self, other)
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        """The total."""
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """The largest of what was measured. A nan stays: it is never hidden behind a larger number."""

    peak: float

    def merge(self, other: Metric) -> Max:
        """The larger of both parts. Raises TypeError on another kind."""
        if not isinstance(other, Max):
            raise _kinds_differ(self, other)
        return Max(_nan_or(max, self.peak, other.peak))

    @property
    def value(self) -> float:
        """The peak."""
        return self.peak


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest of what was measured. A nan stays: it is never hidden behind a smaller number."""

    low: float

    def merge(self, other: Metric) -> Min:
        """The smaller of both parts. Raises TypeError on another kind."""
        if not isinstance(other, Min):
            raise _kinds_differ(self, other)
        return Min(_nan_or(min, self.low, other.low))

    @property
    def value(self) -> float:
        """The low."""
        return self.low


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
    counting the same. A Mean of weight 0 measured nothing and is left out (nan when no update measured it). A metric
    may be missing in some updates. Raises TypeError when a name has different kinds in different updates.
    """
    return {name: _over_updates(found) for name, found in _by_name(updates).items()}


def values(metrics: Metrics) -> dict[str, float]:
    """The number each metric stands for."""
    return {name: metric.value for name, metric in metrics.items()}


def _by_name(parts: Sequence[Metrics]) -> dict[str, list[Metric]]:
    found: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            same_name = found.setdefault(name, [])
            if same_name and type(same_name[0]) is not type(metric):
                raise TypeError(f"metric {name!r}: {_kinds_differ(same_name[0], metric)}")
            same_name.append(metric)
    return found


def _over_updates(found: list[Metric]) -> float:
    if isinstance(found[0], Max | Min):
        return reduce(_merge, found).value
    measured = [m.value for m in found if not (isinstance(m, Mean) and m.weight == 0)]
    return sum(measured) / len(measured) if measured else math.nan


def _merge(a: Metric, b: Metric) -> Metric:
    return a.merge(b)


def _nan_or(choose: Callable[[float, float], float], a: float, b: float) -> float:
    # max() and min() alone keep or lose a nan depending on the order of their arguments.
    return math.nan if math.isnan(a) or math.isnan(b) else choose(a, b)


def _kinds_differ(a: Metric, b: Metric) -> TypeError:
    kinds = f"a {type(a).__name__} with a {type(b).__name__}"
    return TypeError(f"cannot merge {kinds}: a metric has the same kind wherever it is measured")
