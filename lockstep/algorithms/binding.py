"""Bind a loss or an estimator: read the names of its arguments and give it its numbers once, then call it with every batch.

Every column is flat, [M]. A user's function that is written for padded blocks [B, T] is bound by `PaddedCall`, which gives it blocks and
flattens the results; nothing else sees blocks.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.algorithms.registry import input_names
from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError


def token_column(what: str, x: Any, shape: tuple[int, ...], called: str = "") -> Tensor:
    """Return x if it is a tensor of this shape; raise ConfigError, naming the function `what`, if it is not."""
    if isinstance(x, Tensor) and x.shape == shape:
        return x
    returned = kind_of(x) + (f" as {called}" if called else "")
    raise ConfigError(f"{what} must return one number per token, {shape}, before any mean; it returned {returned}")


def kind_of(x: Any) -> str:
    """Return words for the type and shape of a returned value."""
    if isinstance(x, tuple | list):
        return f"{type(x).__name__} of {len(x)}"
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


class Bound:
    """A function together with its numbers: the entries of `parameters` that its arguments name.

    `what` names the function in messages; `remedy` ends the message about a missing column. Raise ConfigError if an argument of
    the function is not keyword-only.
    """

    what: str
    """The function's name in messages."""
    columns: dict[str, bool]
    """Column -> True if the function requires it. A column with the name of a parameter replaces the parameter."""
    takes_rows: bool
    """True if the function reads `rows`. A function that does not can be called with any part of the tokens."""
    function: Callable[..., Any]
    """The function with its parameters; takes columns, and `rows` if it reads them, by name."""

    def __init__(self, what: str, function: Callable[..., Any], parameters: Mapping[str, Any], remedy: str) -> None:
        names = input_names(what, function)
        given = {name: parameters[name] for name in names if parameters.get(name) is not None}
        self.columns = {name: required and name not in given for name, required in names.items() if name != "rows"}
        self.takes_rows = "rows" in names
        self.function = functools.partial(function, **given)
        self.what = what
        self._remedy = remedy
        self._parameters = parameters

    def arguments(self, columns: Mapping[str, Any], rows: Rows | None) -> dict[str, Any]:
        """Return the keyword arguments for `function`. A column that is None counts as missing.

        Raise ConfigError if a required column is missing.
        """
        given = {name: columns[name] for name in self.columns if columns.get(name) is not None}
        missing = [name for name, required in self.columns.items() if required and name not in given]
        if missing:
            present = sorted(name for name, value in {**self._parameters, **columns}.items() if value is not None)
            raise ConfigError(
                f"{self.what} needs {', '.join(missing)}, which this run does not have (it has {', '.join(present)}): {self._remedy}"
            )
        return given | {"rows": rows} if self.takes_rows else given

    def __call__(self, columns: Mapping[str, Any], rows: Rows | None) -> Any:
        """Return the function's result for the tokens of these rows, flat. Raise ConfigError if a required column is missing."""
        return self.function(**self.arguments(columns, rows))


def read_estimate(estimator: Bound, result: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, [M] each, from an estimator's result. Raise ConfigError if the result is anything else."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ConfigError(f"{estimator.what} must return (advantages, returns); it returned {kind_of(result)}")
    advantages, returns = (
        token_column(estimator.what, x, (rows.num_tokens,), name) for name, x in zip(("advantages", "returns"), result, strict=True)
    )
    return advantages, returns


def read_loss(loss: Bound, result: Any, log_prob: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss per token [M] and its metrics, [M] each, from a loss's result for `log_prob` [M].

    Raise ConfigError if the result is anything else, or has no gradient although `log_prob` has one.
    """
    if not isinstance(result, tuple | list) or len(result) != 2 or not isinstance(result[1], dict):
        raise ConfigError(
            f"{loss.what} must return (loss, metrics), one number per token and a dict; it returned {kind_of(result)}"
        )
    values, metrics = result
    for name, x in {"the loss": values, **{f"metric {name!r}": x for name, x in metrics.items()}}.items():
        token_column(loss.what, x, tuple(log_prob.shape), name)
    if log_prob.requires_grad and not values.requires_grad:
        raise ConfigError(f"{loss.what} returned a loss without a gradient: compute it from log_prob, not detached")
    return values, metrics


PER_ROW = frozenset({"row_keys", "group", "reward_baselines", "reward_parts", "reward_part_weights"})
"""Inputs that belong to rows or to the batch, so they have no tokens to pad."""


def on_blocks(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function on padded blocks so that it takes flat columns and `rows`, and returns flat columns.

    The function receives every tensor [M] outside `PER_ROW` as [B, T], T the longest row, with zeros behind the shorter rows. A result
    that is not [B, T] raises ConfigError, naming `what`.
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
    """A `Bound` function that takes and returns padded blocks, because it does not name `rows`."""

    def __init__(self, what: str, function: Callable[..., Any], parameters: Mapping[str, Any], remedy: str) -> None:
        super().__init__(what, function, parameters, remedy)
        self.takes_rows = True
        self.function = on_blocks(what, self.function)
