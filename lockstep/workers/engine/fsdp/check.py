"""Whether a model and a number of ranks fit what fsdp_config asks for; known before the model is loaded."""

from __future__ import annotations

from typing import Any

from lockstep.config.engine import FSDPConfig
from lockstep.workers.engine.sequence import check_sequence_ranks


def check(section: FSDPConfig, hf_config: Any, world_size: int, key: str) -> None:
    """Raise ConfigError for a layout that cannot be. `key` is where the section lies in the configuration."""
    size = section.ulysses_sequence_parallel_size
    check_sequence_ranks(size, hf_config, world_size, f"{key}.ulysses_sequence_parallel_size")
