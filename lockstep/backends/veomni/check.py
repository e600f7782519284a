"""Whether a model and a number of ranks fit what the veomni section asks for; known before the model is loaded."""

from importlib.util import find_spec
from typing import Any

from lockstep.config.engine import EngineChoice, VeOmniConfig
from lockstep.errors import ConfigError
from lockstep.workers.engine.sequence import check_sequence_ranks

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
INSTALL = "pip install --no-deps veomni==0.1.12 && pip install einops"
"""Without its own dependencies, which pin other versions of packages that are there already."""


def check(choice: EngineChoice, hf_config: Any, world_size: int, device_type: str, key: str) -> None:
    """Raise ConfigError unless `world_size` ranks of any device can hold a model of `hf_config` as `choice.veomni` says; `key` is where
    that section stands in the configuration."""
    section = choice.veomni
    for package in ("veomni", "einops"):
        if find_spec(package) is None:
            raise ConfigError(f"strategy=veomni needs the package {package}, which is not installed: {INSTALL}")
    if hf_config.model_type not in FAMILIES:
        raise ConfigError(
            f"strategy=veomni knows the families {', '.join(FAMILIES)}, and the model is a {hf_config.model_type}; set strategy=fsdp2"
        )
    sequence = section.ulysses_parallel_size
    check_sequence_ranks(sequence, hf_config, world_size, f"{key}.ulysses_parallel_size")
    copy = copy_ranks(section, world_size)
    if world_size % copy or copy % sequence:
        raise ConfigError(
            f"{key}.fsdp_size={copy} must divide the {world_size} ranks and be a multiple of {key}.ulysses_parallel_size={sequence}: "
            "each group of that many holds one copy, and those that divide the tokens of a micro-batch are in the same one"
        )


def copy_ranks(section: VeOmniConfig, world_size: int) -> int:
    """The ranks that share one copy of the model."""
    return world_size if section.fsdp_size == -1 else section.fsdp_size
