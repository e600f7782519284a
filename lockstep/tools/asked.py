"""A configuration as the tools are asked for it: `[COMMAND] [--config FILE] key=value ...`, as a training command takes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.load import Layer, load_config, load_recipe, read_layers
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


def read_asked(words: Sequence[str], config_file: str | Path | None) -> Asked:
    """What `lockstep WORDS` would train with; without a command's name first it is `ppo`. Raises ConfigError as that command would."""
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
        return Asked(command, root, load_config(words, config_file, command), read_layers(root, words, config_file, command))
    root = ROOTS[command]
    return Asked(command, root, load_recipe(root, words, config_file), read_layers(root, words, config_file))
