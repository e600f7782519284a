"""The command line of a training, for commands that describe or check one: `[COMMAND] [--config FILE] key=value ...`."""

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
class TrainingCommand:
    """A training command and its configuration."""

    command: str
    """ppo, grpo, sft, ..."""
    root: Any
    """The class of its configuration."""
    config: Any
    layers: list[Layer]
    """Where the values come from."""

    @property
    def is_first_run(self) -> bool:
        """Whether the run is small because this machine has no GPU and no key sets a size."""
        return any(layer.origin == FIRST_RUN for layer in self.layers)


def read_training_command(
    words: Sequence[str], config_file: str | Path | None, device_of: Callable[[str], str] | None = None
) -> TrainingCommand:
    """Return what `lockstep WORDS` would train with; without a command's name it is `ppo`. Raises ConfigError as that command would.

    With `device_of` (config/load.py::read_layers) the configuration is for this machine, otherwise for GPUs. With `--from-verl` among the
    words file and keys are verl's, as for a training command.
    """
    is_verls = _FROM_VERL in words
    words = [word for word in words if word != _FROM_VERL]
    command = "ppo"
    if words and "=" not in words[0]:
        name = words.pop(0)
        spellings = {known.replace("_", "-"): known for known in (*ALGORITHMS, *ROOTS)}
        if name.replace("_", "-") not in spellings:
            raise ConfigError(f"'{name}' is neither key=value nor a training command: {', '.join(spellings.values())}")
        command = spellings[name.replace("_", "-")]
    is_ppo = command in ALGORITHMS
    root: Any = ROOTS["ppo" if is_ppo else command]
    if is_verls:
        if not is_ppo:
            raise ConfigError(f"{_FROM_VERL} is for ppo and its relatives, not for {command}")
        from lockstep.compat.verl_keys.command import from_verl

        words = from_verl(words, Path(config_file) if config_file else None)
        config_file = None
    layers = read_layers(root, words, config_file, command if is_ppo else "ppo", device_of)
    return TrainingCommand(command, root, of_layers(root, layers), layers)
