"""Metrics and checks whose numbers are still on the device.

Reading a number waits for all earlier work of the device, so an update reads all of them together, after its last micro-batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from lockstep.algorithms.rows import Rows
from lockstep.errors import NumericalError
from lockstep.models.chunked_head import LossOutput
from lockstep.observability.metrics import Max, Mean, Metric, Sum


@dataclass(frozen=True)
class Pending:
    """A metric that is made from `numbers` [any shape] once they are read; None if nothing was measured."""

    numbers: Tensor
    make: Callable[[list[float]], Metric | None]


@dataclass(frozen=True)
class Check:
    """A check of `numbers` [any shape] once they are read: `check` raises if they are wrong."""

    numbers: Tensor
    check: Callable[[list[float]], None]


Metrics = dict[str, Metric | Pending]


def pending_sum(value: Tensor) -> Pending:
    """Return the Sum of a tensor with one number."""
    return Pending(value.detach(), lambda numbers: Sum(*numbers))


def pending_mean(total: Tensor, weight: Tensor) -> Pending:
    """Return the Mean of two tensors with one number each."""
    return Pending(torch.stack([total.detach().double(), weight.double()]), lambda numbers: Mean(*numbers))


def pending_max(value: Tensor, count: Tensor) -> Pending:
    """Return the Max of a tensor with one number, the largest of `count` numbers; no metric if `count` is 0."""
    return Pending(torch.stack([value.detach().double(), count.double()]), lambda n: Max(n[0]) if n[1] else None)


def all_finite(name: str, values: Tensor, rows: Rows, indices: Sequence[int]) -> Check:
    """Return a check of values [M] that raises NumericalError, with the dataset rows `indices` [B], unless all of them are finite."""

    def check(bad: list[float]) -> None:
        found = [index for index, count in zip(indices, bad, strict=True) if count]
        if found:
            raise NumericalError(
                f"{name}: not finite in the update for {len(found)} rows; dataset rows {found[:10]}. Nothing was updated"
            )

    return Check(rows.sum(values.detach().isfinite().logical_not()), check)


def finite_loss(loss: Tensor, indices: Sequence[int]) -> Check:
    """Return a check that raises NumericalError, with the dataset rows `indices` of the chunk, unless its loss is finite."""

    def check(numbers: list[float]) -> None:
        if not math.isfinite(numbers[0]):
            raise NumericalError(
                f"the loss is {numbers[0]} in a micro-batch with dataset rows {list(indices)}; nothing was updated. "
                "Look at these rows' log-probs, advantages and rewards"
            )

    return Check(loss, check)


def read(outputs: Sequence[LossOutput]) -> list[dict[str, Metric]]:
    """Return the metrics of each output; all numbers come in one copy. Raise what a check raises, the first output's first."""
    pending: list[Pending | Check] = []
    for output in outputs:
        pending += [metric for metric in output.metrics.values() if isinstance(metric, Pending)]
        pending += output.checks
    numbers = iter(torch.cat([one.numbers.flatten().double() for one in pending]).tolist() if pending else ())

    def take(one: Pending | Check) -> list[float]:
        return list(islice(numbers, one.numbers.numel()))

    found = []
    for output in outputs:
        made = {}
        for name, metric in output.metrics.items():
            value = metric.make(take(metric)) if isinstance(metric, Pending) else metric
            if value is not None:
                made[name] = value
        for check in output.checks:
            check.check(take(check))
        found.append(made)
    return found
