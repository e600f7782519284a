"""Someone's LoRA adapter as a start: what peft's adapter_config.json says, and whether it can be trained here."""

import json
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_KEPT = ("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
"""What decides which layers get which adapter."""
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}  # fmt: skip
"""Options with a word for what is plain LoRA; other ways to initialise change the model's own weights."""
_OF_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "revision", "task_type",
}  # fmt: skip
"""Where it comes from, defaults of options that are off, and dropout, which nothing here has."""


def read_adapter(folder: str, key: str) -> dict[str, Any]:
    """The arguments of peft's LoraConfig for the adapter in `folder`, the value of `key`.

    Raises ConfigError unless it is a LoRA adapter in safetensors, with adapters of one rank beside linear layers and nothing else that
    learns but a score head.
    """
    path = Path(folder)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (path / name).is_file():
            raise ConfigError(
                f"{key}={folder} has no {name}; name a folder that peft wrote, such as global_step_N/actor/adapter of a checkpoint"
            )
    try:
        found = json.loads((path / ADAPTER_CONFIG).read_text())
        kind = found.get("peft_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{key}={folder}: {ADAPTER_CONFIG} cannot be read: {error!r}") from error
    if kind != "LORA":
        raise ConfigError(f"{key}={folder} is not a LoRA adapter but peft_type={kind}; start from a LoRA adapter")
    for name, value in found.items():
        if not _is_plain(name, value):
            raise ConfigError(
                f"{key}={folder} has {name}={value}, which cannot be trained here; merge the adapter into its model with peft "
                "(merge_and_unload) and start from that with model.path"
            )
    if not isinstance(found.get("r"), int) or found["r"] < 1 or not found.get("target_modules"):
        raise ConfigError(f"{key}={folder}: {ADAPTER_CONFIG} has no rank (r) or no target_modules; it is not complete")
    return {name: found[name] for name in _KEPT if name in found}


def _is_plain(name: str, value: Any) -> bool:
    """Whether an option leaves the adapter what `read_adapter` returns."""
    if name == "modules_to_save":  # peft names both for whatever classifies; the file says which there is
        return set(value or ()) <= {"score", "classifier"}
    return not value or name in _KEPT or name in _OF_NO_EFFECT or value in _ALLOWED.get(name, ())
