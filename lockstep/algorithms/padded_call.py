"""A user's function that is written for padded blocks [B, T], bound so that it is called with flat columns [M] as every other is.

Nothing else sees blocks. (blocks.py is the other way round: for callers whose batches are blocks.)
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.algorithms.bound import Bound, token_column
from lockstep.algorithms.rows import Rows

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
            return rows.unpad(token_column(what, x, shape))

        return unpadded(function(**{name: rows.pad(x) if name in flat else x for name, x in inputs.items()}))

    return call


class PaddedCall(Bound):
    """See Bound. The function does not name `rows`; it takes and returns blocks."""

    def __init__(self, what: str, function: Callable[..., Any], parameters: Mapping[str, Any], remedy: str) -> None:
        super().__init__(what, function, parameters, remedy)
        self.takes_rows, self.function = True, on_blocks(what, self.function)
