"""Each value of a configuration, and where it comes from."""

import functools
import textwrap
from collections.abc import Iterator
from typing import Any

from lockstep.config.identity import redacted
from lockstep.config.keys import is_of_another_engine, valid_keys
from lockstep.config.reference import keys
from lockstep.tools.training_command import TrainingCommand

DEFAULT = "default"
_WIDTH = 120


def origins(training: TrainingCommand) -> dict[str, str]:
    """Key -> where its value comes from: default, a preset, a file, the command line."""
    found = dict.fromkeys(valid_keys(training.root), DEFAULT)
    for layer in training.layers:
        for key in layer.keys:
            while key not in found:  # a key within a free-form dict
                key = key.rpartition(".")[0]
            found[key] = layer.origin
    return found


def values(training: TrainingCommand) -> Iterator[tuple[str, Any, str]]:
    """Key, value without what is secret, origin."""
    places = origins(training)
    defaults = {key: default for key, default, _ in keys(training.root)}
    for key, origin in places.items():
        value = functools.reduce(getattr, key.split("."), training.config)
        shown = redacted({key.rpartition(".")[2]: value})[key.rpartition(".")[2]]
        if origin == DEFAULT and value != defaults[key]:
            origin = "made of the others"
        elif key == "trainer.critic_warmup" and origin != DEFAULT and not value and not training.config.use_critic:
            origin = "no critic"
        yield key, shown, origin


def values_text(training: TrainingCommand, shows_all: bool = False) -> str:
    """What the user gave and what was set for them, one per line with its origin; the defaults, by section, only with `shows_all`."""
    listed = list(values(training))
    by_user = {layer.origin for layer in training.layers if layer.by_user}
    given = [item for item in listed if item[2] in by_user]
    made = [item for item in listed if item[2] not in by_user and item[2] != DEFAULT]
    width = min(90, max((len(f"{key}={value}") for key, value, _ in given + made), default=0))
    lines: list[str] = []
    for title, entries in (("given by you:", given), ("set for you:", made)):
        if entries:
            lines += ["", title, *(f"  {f'{key}={value}':{width}}  {origin}" for key, value, origin in entries)]
    strategies = {key: str(value) for key, value, _ in listed}
    defaults = [item for item in listed if item[2] == DEFAULT and not is_of_another_engine(item[0], strategies.__getitem__)]
    if not shows_all:
        return "\n".join([*lines[1:], "", f"{len(defaults)} other keys have their defaults (--all lists them)"])
    lines += ["", "defaults:"]
    groups: dict[str, list[str]] = {}
    for key, value, _ in defaults:
        group, _, name = key.rpartition(".")
        groups.setdefault(group, []).append(f"{name}={value}")
    for group, names in groups.items():
        lines.append(textwrap.fill("  ".join(names), _WIDTH, initial_indent=f"  {group}: ", subsequent_indent="      "))
    return "\n".join(lines[1:])
