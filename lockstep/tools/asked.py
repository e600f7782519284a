"""A configuration as the tools are asked for it: `[COMMAND] [--config FILE] key=value ...`, as a training command takes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.load import Layer, of_layers, read_layers
from lockstep.config.presets import ALGORITHMS
from lockstep.config.reference import ROOTS
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class Asked:
    """A training command and its configuration."""

    command: str
    root: Any
    config: Any
    layers: list[Layer]
    """Where the values come from."""


def read_asked(words: Sequence[str], config_file: str | Path | None, device_of: Callable[[str], str] | None = None) -> Asked:
    """What `lockstep WORDS` would train with; without a command's name first it is `ppo`. Raises ConfigError as that command would.

    With `device_of` (config/load.py::read_layers) it is for the machine that asks, otherwise for GPUs.
    """
    words = list(words)
    command = "ppo"
    if words and "=" not in words[0]:
        name = words.pop(0)
        spelled = {known.replace("_", "-"): known for known in (*ALGORITHMS, *ROOTS)}
        if name.replace("_", "-") not in spelled:
            raise ConfigError(f"'{name}' is neither key=value nor a training command: {', '.join(spelled.values())}")
        command = spelled[name.replace("_", "-")]
    if command in ALGORITHMS:
        root: Any = ROOTS["ppo"]
        layers = read_layers(root, words, config_file, command, device_of)
    else:
        root = ROOTS[command]
        layers = read_layers(root, words, config_file, device_of=device_of)
    return Asked(command, root, of_layers(root, layers), layers)
