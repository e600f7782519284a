"""Whether a model and a number of ranks fit what fsdp_config asks for; known before the model is loaded."""

from __future__ import annotations

from typing import Any

from lockstep.config.engine import FSDPConfig
from lockstep.errors import ConfigError
from lockstep.workers.engine.sequence import check_sequence_ranks


def check(section: FSDPConfig, hf_config: Any, world_size: int, key: str, strategy: str = "fsdp2") -> None:
    """Raise ConfigError unless `world_size` ranks can hold a model of `hf_config` as `section` says. `key` names the section."""
    size = section.ulysses_sequence_parallel_size
    check_sequence_ranks(size, hf_config, world_size, f"{key}.ulysses_sequence_parallel_size")
    if section.fsdp_size in (-1, world_size):
        return
    if strategy == "fsdp":
        raise ConfigError(
            f"{key}.fsdp_size={section.fsdp_size} needs strategy fsdp2; fsdp shares one copy among all {world_size} ranks (-1)"
        )
    if world_size % section.fsdp_size:
        raise ConfigError(
            f"{key}.fsdp_size={section.fsdp_size} must divide the {world_size} ranks: each group of that many holds one copy"
        )
