"""Metrics whose numbers are read together."""

import math

import pytest
import torch

from lockstep.algorithms.rows import Rows
from lockstep.errors import NumericalError
from lockstep.models.chunked_head import LossOutput
from lockstep.observability.metrics import Max, Mean, Metric, Sum
from lockstep.workers.engine.pending import Check, Pending, all_finite, pending_max, pending_mean, pending_sum, read


def output(metrics: dict[str, Metric | Pending], *checks: Check) -> LossOutput:
    return LossOutput(torch.zeros(()), metrics, checks)


def test_every_number_comes_to_its_own_metric_and_checks_leave_none() -> None:
    half, mask = torch.tensor(0.1, requires_grad=True), torch.tensor([True, True, False])
    fine = all_finite("x", torch.ones(6), Rows(torch.tensor([3, 3])), [7, 8])
    last = {"c": pending_mean(torch.tensor(5.0), mask.sum()), "d": pending_max(torch.tensor(-math.inf), mask.sum()), "a": Sum(2.0)}
    outputs = [output({"a": pending_sum(half), "b": Mean(3.0, 2.0)}, fine), output({}), output(last)]
    assert read(outputs) == [
        {"a": Sum(pytest.approx(0.1, rel=1e-7)), "b": Mean(3.0, 2.0)},
        {},
        {"c": Mean(5.0, 2.0), "d": Max(-math.inf), "a": Sum(2.0)},
    ]
    assert read([output({"a": Sum(1.0)})]) == [{"a": Sum(1.0)}]
    assert read([output({"largest of nothing": pending_max(torch.tensor(0.0), mask[2:].sum())})]) == [{}]


def test_the_first_check_that_fails_names_its_dataset_rows() -> None:
    values, rows = torch.ones(6), Rows(torch.tensor([2, 1, 3]))
    values[2], values[4] = math.nan, math.inf
    later = all_finite("later", torch.full((1,), math.nan), Rows(torch.tensor([1])), [1])
    with pytest.raises(NumericalError, match=r"log-probs: not finite in the update for 2 rows; dataset rows \[41, 42\]"):
        first = all_finite("log-probs", values, rows, [40, 41, 42])
        read([output({"a": pending_sum(torch.tensor(1.0))}, first), output({}, later)])
