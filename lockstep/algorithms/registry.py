"""What the registries of this package share: a helpful miss, no silent overwriting, and the names of arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
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
