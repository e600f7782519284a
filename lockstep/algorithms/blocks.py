"""Padded blocks for users' functions: one that does not name `rows` is written for [B, T], while every column here is flat, [M]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError

PER_ROW = frozenset({"row_keys", "group", "reward_baselines", "reward_parts", "reward_part_weights"})
"""The inputs that belong to rows, or to the batch: they have no tokens to pad."""


def on_blocks(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which takes and returns padded blocks, as one that takes flat columns and `rows` and returns flat columns.

    Every tensor [M] that is not `PER_ROW` comes to it as [B, T], T the longest row, with zeros behind the shorter rows.
    Calling the result raises ConfigError, which begins with `what`, when the function returns something that is not [B, T].
    """

    def call(*, rows: Rows, **inputs: Any) -> Any:
        shape = (len(rows), int(rows.lengths.max()) if len(rows) else 0)
        flat = {
            name for name, x in inputs.items() if isinstance(x, Tensor) and name not in PER_ROW and x.shape == (rows.num_tokens,)
        }

        def unpadded(x: Any) -> Any:
            if isinstance(x, dict):
                return {name: unpadded(part) for name, part in x.items()}
            if isinstance(x, tuple | list):
                return tuple(unpadded(part) for part in x)
            if not isinstance(x, Tensor) or x.shape != shape:
                got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise ConfigError(f"{what} must return one number per token, {shape}, before any mean; it returned {got}")
            return rows.unpad(x)

        return unpadded(function(**{name: rows.pad(x) if name in flat else x for name, x in inputs.items()}))

    return call
