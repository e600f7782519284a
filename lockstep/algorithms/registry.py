"""What the registries of this package share: a helpful miss, no silent overwriting, and the names of arguments."""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.errors import ConfigError

F = TypeVar("F")


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not among `known`: it says the nearest one, when there is one, and all of them."""
    known = list(known)
    nearest = difflib.get_close_matches(str(name).lower(), known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return ConfigError(f"unknown {what} {name!r}{hint} Known: {', '.join(known)}")


def registering(what: str, table: dict[str, F], name: str) -> Callable[[F], F]:
    """A decorator that puts a function into `table` under `name`. Raises ConfigError when another function has that name."""

    def decorate(function: F) -> F:
        if table.get(name, function) is not function:
            raise ConfigError(f"{what} {name!r} is already registered, as {table[name]!r}: choose another name")
        table[name] = function
        return function

    return decorate


def input_names(what: str, function: Callable[..., Any]) -> dict[str, bool]:
    """The arguments of a function, and whether each is required; **kwargs has nothing to take. `what` names the function in messages.

    Raises ConfigError for an argument that cannot be given by name: inputs are matched by name.
    """
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for parameter in parameters:
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise ConfigError(f"{what} takes {str(parameter)!r}, but its arguments are given by name: name each of them")
    return {p.name: p.default is p.empty for p in parameters}


@dataclass(frozen=True)
class LossTable:
    """Losses by name. A loss may have a `prepare`, which is called once with a whole mini-batch before it is cut."""

    kind: str
    """What messages call one of them."""
    losses: dict[str, Callable[..., Any]]
    prepares: dict[Callable[..., Any], Callable[..., dict[str, Any]]]
    batch_inputs: tuple[str, ...]
    """The arguments that come from the batch."""

    def register(self, name: str, prepare: Callable[..., dict[str, Any]] | None = None) -> Callable[[F], F]:
        """Make the decorated function the loss `name`, with its whole-mini-batch `prepare` if it has one.

        Raises ConfigError when the name is taken, or when an argument is not keyword-only (arguments are matched by name).
        """

        def decorate(loss: Any) -> Any:
            input_names(self.what(name), loss)
            registering(self.kind, self.losses, name)(loss)
            if prepare is not None:
                input_names(f"the prepare of {self.what(name)}", prepare)
                self.prepares[loss] = prepare
            return loss

        return decorate

    def get(self, name: str) -> Callable[..., Any]:
        """The loss registered as `name`; ConfigError when there is none."""
        if name not in self.losses:
            raise unknown_name(self.kind, name, self.losses)
        return self.losses[name]

    def missing_numbers(self, loss: Callable[..., Any], given: Collection[str]) -> list[str]:
        """The required arguments of the loss, or of its `prepare` if it has one, that are neither `given` nor come from the batch."""
        required = [name for name, needed in input_names(self.what(loss), self.prepares.get(loss, loss)).items() if needed]
        return [name for name in required if name not in given and name not in self.batch_inputs]

    def what(self, loss: str | Callable[..., Any]) -> str:
        """What messages call this one."""
        return f"{self.kind} {loss if isinstance(loss, str) else getattr(loss, '__name__', loss)!r}"
