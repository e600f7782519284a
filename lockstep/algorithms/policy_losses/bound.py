"""A policy loss whose names are read and whose numbers are given once, to be called with every micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.algorithms.blocks import on_blocks
from lockstep.algorithms.registry import input_names, missing_inputs
from lockstep.algorithms.rows import Rows

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

REMEDY = "add it to actor_rollout_ref.actor.policy_loss.loss_kwargs, or give the argument a default"


class BoundLoss:
    """The loss with those of the `parameters` that it names; `what` names it in messages.

    Raises ConfigError when an argument of the loss is not keyword-only.
    """

    columns: dict[str, bool]
    """The columns that the loss reads, and whether it cannot do without each. One with the name of a number replaces it."""
    takes_rows: bool
    """Whether it looks at whole rows. One that does not can be called with any part of the tokens."""
    function: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    """The loss with its numbers; takes columns, and rows if it looks at them, by name."""

    def __init__(self, what: str, loss: PolicyLoss, parameters: Mapping[str, Any], takes_blocks: bool) -> None:
        names = input_names(what, loss)
        numbers = {name: parameters[name] for name in names if parameters.get(name) is not None}
        self.columns = {name: required and name not in numbers for name, required in names.items() if name != "rows"}
        self.takes_rows = takes_blocks or "rows" in names
        self.function = functools.partial(on_blocks(what, loss) if takes_blocks else loss, **numbers)
        self._what, self._parameters = what, parameters

    def arguments(self, columns: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
        """What `function` is to be called with. A column that is None counts as missing.

        Raises ConfigError when a column that the loss requires is missing.
        """
        given = {name: columns[name] for name in self.columns if columns.get(name) is not None}
        missing = [name for name, required in self.columns.items() if required and name not in given]
        if missing:
            raise missing_inputs(self._what, missing, {**self._parameters, **columns}, REMEDY)
        return given | {"rows": rows} if self.takes_rows else given

    def __call__(self, columns: Mapping[str, Any], rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [M] and its metrics, [M] each, of the tokens of these rows. Raises as `arguments` does."""
        return self.function(**self.arguments(columns, rows))
