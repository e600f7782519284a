"""verl's path to `lockstep.data.rl_dataset`."""

from typing import Any

from lockstep.data import rl_dataset
from lockstep.errors import ConfigError

__all__ = ["RLHFDataset"]


class RLHFDataset(rl_dataset.RLHFDataset):
    """`lockstep.data.rl_dataset.RLHFDataset` with verl's arguments. Raises ConfigError for a processor of images: training is on text."""

    def __init__(self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1) -> None:
        if processor is not None:
            raise ConfigError(f"processor must be None, not {type(processor).__name__}: training is on text")
        super().__init__(data_files, tokenizer, config, max_samples)
