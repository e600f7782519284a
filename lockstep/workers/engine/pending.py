"""Numbers that are still on the device. Reading one waits for all that was asked of the device before, so an update reads them together,
after its last micro-batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from lockstep.algorithms.rows import Rows
from lockstep.errors import NumericalError
from lockstep.observability.metrics import Max, Mean, Metric, Sum


@dataclass(frozen=True)
class Pending:
    """A metric, or a check that gives none, which is made from `numbers` [any shape] once they are read."""

    numbers: Tensor
    make: Callable[[list[float]], Metric | None]


def pending_sum(value: Tensor) -> Pending:
    """Sum of a tensor with one number."""
    return Pending(value.detach(), lambda numbers: Sum(*numbers))


def pending_mean(total: Tensor, weight: Tensor) -> Pending:
    """Mean of two tensors with one number each."""
    return Pending(torch.stack([total.detach().double(), weight.double()]), lambda numbers: Mean(*numbers))


def pending_max(value: Tensor, count: Tensor) -> Pending:
    """Max of a tensor with one number, the largest of `count`; none where that is 0: nothing was measured."""
    return Pending(torch.stack([value.detach().double(), count.double()]), lambda n: Max(n[0]) if n[1] else None)


def all_finite(name: str, values: Tensor, rows: Rows, indices: Sequence[int]) -> Pending:
    """A check of values [M]: reading it raises NumericalError, with the dataset rows `indices` [B], unless all of them are finite."""

    def check(bad: list[float]) -> None:
        found = [index for index, count in zip(indices, bad, strict=True) if count]
        if found:
            raise NumericalError(
                f"{name}: not finite in the update for {len(found)} rows; dataset rows {found[:10]}. Nothing was updated"
            )

    return Pending(rows.sum(values.detach().isfinite().logical_not()), check)


def read(parts: Sequence[Mapping[str, Metric | Pending]]) -> list[dict[str, Metric]]:
    """The metrics with their numbers, which come in one copy. Raises what a check raises, the first part's first."""
    pending = [metric for part in parts for metric in part.values() if isinstance(metric, Pending)]
    numbers = iter(torch.cat([metric.numbers.flatten().double() for metric in pending]).tolist() if pending else ())
    found = []
    for part in parts:
        made = {
            name: metric.make(list(islice(numbers, metric.numbers.numel()))) if isinstance(metric, Pending) else metric
            for name, metric in part.items()
        }
        found.append({name: metric for name, metric in made.items() if metric is not None})
    return found
