"""What the registries of this package share: a helpful miss, and no silent overwriting."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TypeVar

from lockstep.errors import ConfigError

F = TypeVar("F")


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not among `known`: it says the nearest one, when there is one, and all of them."""
    known = list(known)
    nearest = difflib.get_close_matches(str(name).lower(), known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return ConfigError(f"unknown {what} {name!r}{hint} Known: {', '.join(known)}")


def registering(what: str, table: dict[str, F], name: str) -> Callable[[F], F]:
    """A decorator that puts a function into `table` under `name`. Raises ConfigError when the name is taken."""

    def decorate(function: F) -> F:
        if name in table:
            raise ConfigError(f"{what} {name!r} is already registered, as {table[name]!r}: choose another name")
        table[name] = function
        return function

    return decorate
