"""A configuration as the tools are asked for it: `[COMMAND] [--config FILE] key=value ...`, as a training command takes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.load import Layer, of_layers, read_layers
from lockstep.config.presets import ALGORITHMS, FIRST_RUN
from lockstep.config.reference import ROOTS
from lockstep.errors import ConfigError

_FROM_VERL = "--from-verl"


@dataclass(frozen=True)
class Asked:
    """A training command and its configuration."""

    command: str
    root: Any
    config: Any
    layers: list[Layer]
    """Where the values come from."""

    @property
    def is_first_run(self) -> bool:
        """Whether it is small because there is no GPU here and no key says how large it is."""
        return any(layer.origin == FIRST_RUN for layer in self.layers)


def read_asked(words: Sequence[str], config_file: str | Path | None, device_of: Callable[[str], str] | None = None) -> Asked:
    """What `lockstep WORDS` would train with; without a command's name first it is `ppo`. Raises ConfigError as that command would.

    With `device_of` (config/load.py::read_layers) it is for the machine that asks, otherwise for GPUs. With `--from-verl` among the words
    file and keys are verl's, as for that command.
    """
    is_verls = _FROM_VERL in words
    words = [word for word in words if word != _FROM_VERL]
    command = "ppo"
    if words and "=" not in words[0]:
        name = words.pop(0)
        spelled = {known.replace("_", "-"): known for known in (*ALGORITHMS, *ROOTS)}
        if name.replace("_", "-") not in spelled:
            raise ConfigError(f"'{name}' is neither key=value nor a training command: {', '.join(spelled.values())}")
        command = spelled[name.replace("_", "-")]
    is_ppo = command in ALGORITHMS
    root: Any = ROOTS["ppo" if is_ppo else command]
    if is_verls:
        if not is_ppo:
            raise ConfigError(f"{_FROM_VERL} is for ppo and its relatives, not for {command}")
        from lockstep.compat.verl_keys.command import from_verl

        words, config_file = from_verl(words, Path(config_file) if config_file else None), None
    layers = read_layers(root, words, config_file, command if is_ppo else "ppo", device_of)
    return Asked(command, root, of_layers(root, layers), layers)
