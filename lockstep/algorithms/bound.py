"""A loss or an estimator whose names are read and whose numbers are given once, to be called with every batch.

Every column here is flat, [M]. A user's function that wants padded blocks is bound by padded_call.py.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.algorithms.registry import input_names
from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError


def token_column(what: str, x: Any, shape: tuple[int, ...], called: str = "") -> Tensor:
    """x, when it is a tensor of this shape. Otherwise raises ConfigError: the function `what` returned something else."""
    if isinstance(x, Tensor) and x.shape == shape:
        return x
    returned = kind_of(x) + (f" as {called}" if called else "")
    raise ConfigError(f"{what} must return one number per token, {shape}, before any mean; it returned {returned}")


def kind_of(x: Any) -> str:
    """What messages call something that a function returned."""
    if isinstance(x, tuple | list):
        return f"{type(x).__name__} of {len(x)}"
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


class Bound:
    """`function` with those of the `parameters` that it names; `what` names it in messages, `remedy` ends the one for a missing column.

    Raises ConfigError when an argument of the function is not keyword-only.
    """

    what: str
    """What messages call it."""
    columns: dict[str, bool]
    """The columns that it reads, and whether it cannot do without each. One with the name of a parameter replaces it."""
    takes_rows: bool
    """Whether it looks at whole rows. One that does not can be called with any part of the tokens."""
    function: Callable[..., Any]
    """The function with its parameters; takes columns, and rows if it looks at them, by name."""

    def __init__(self, what: str, function: Callable[..., Any], parameters: Mapping[str, Any], remedy: str) -> None:
        names = input_names(what, function)
        given = {name: parameters[name] for name in names if parameters.get(name) is not None}
        self.columns = {name: required and name not in given for name, required in names.items() if name != "rows"}
        self.takes_rows = "rows" in names
        self.function = functools.partial(function, **given)
        self.what, self._remedy, self._parameters = what, remedy, parameters

    def arguments(self, columns: Mapping[str, Any], rows: Rows | None) -> dict[str, Any]:
        """What `function` is to be called with. A column that is None counts as missing.

        Raises ConfigError when a column that the function requires is missing.
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
        """What the function gives for the tokens of these rows, flat. Raises as `arguments` does."""
        return self.function(**self.arguments(columns, rows))


def read_estimate(estimator: Bound, result: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """Advantages and returns, [M] each, from what the estimator returned. Raises ConfigError when it is something else."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ConfigError(f"{estimator.what} must return (advantages, returns); it returned {kind_of(result)}")
    advantages, returns = (
        token_column(estimator.what, x, (rows.num_tokens,), name) for name, x in zip(("advantages", "returns"), result, strict=True)
    )
    return advantages, returns


def read_loss(loss: Bound, result: Any, log_prob: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss per token [M] and its metrics, [M] each, from what the loss returned for `log_prob` [M]. Raises ConfigError when it is
    something else, or a loss that `log_prob` has no part in."""
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
