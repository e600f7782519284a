"""Flat functions on batches that a test writes as blocks [B, T]: rows end with their last selected token."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators, agg_loss
from lockstep.algorithms.policy_losses import PolicyLoss, bind_policy_loss
from lockstep.algorithms.rows import Rows


def rows_of(mask: Tensor) -> Rows:
    """The rows of a block whose mask is this; they end with their last selected token."""
    ends = [max((t + 1 for t, selected in enumerate(row) if selected), default=0) for row in mask.tolist()]
    return Rows(torch.tensor(ends, dtype=torch.int64))


def on_tokens(function: Callable[..., Any], response_mask: Tensor, **inputs: Any) -> Any:
    """Call the function with the tokens of the blocks among the inputs, and with `rows` if it names them; blocks come back."""
    rows = rows_of(response_mask)
    inputs["response_mask"] = response_mask
    flat = {name: rows.unpad(x) if isinstance(x, Tensor) and x.dim() == 2 else x for name, x in inputs.items()}
    if "rows" in inspect.signature(function).parameters:
        flat["rows"] = rows

    def block(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: block(part) for name, part in x.items()}
        if isinstance(x, tuple):
            return tuple(block(part) for part in x)
        return x.new_zeros(response_mask.shape).index_put((rows.index, rows.positions), x)

    return block(function(**flat))


def policy_loss(loss: PolicyLoss, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, bound to the numbers among the inputs and called with the tokens of the blocks; blocks come back."""
    blocks = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    bound = bind_policy_loss(loss, {name: x for name, x in inputs.items() if name not in blocks})
    return on_tokens(lambda *, rows, **columns: bound(columns, rows), **blocks)


def count(mask: Tensor) -> Denominators:
    """The denominators of a block's mask."""
    rows = rows_of(mask)
    return Denominators.of(rows.unpad(mask), rows)


def aggregate(loss: Tensor, mask: Tensor, mode: str, denominators: Denominators, scale: float | None = None) -> Tensor:
    """`agg_loss` of blocks."""
    rows = rows_of(mask)
    return agg_loss(rows.unpad(loss), rows.unpad(mask), mode, denominators, rows, scale)
