"""The families of models whose decoder layer cpu/fused.py and gpu/fused.py compute by hand, and what keys and values in
fewer bits (gpu/tiles.py) want of them besides."""

from typing import NoReturn

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.errors import ConfigError
from lockstep.models.flops import head_size

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Norm, attention with rotary positions, norm, gated MLP."""
MIXTURES = ("mixtral", "qwen3_moe")
"""The same with a mixture of experts in the place of the MLP, or of some: for gpu/fused.py."""
_ROPE_OF_POSITION = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone; the others also look at the longest sequence of the batch."""


def is_fusable(config: PretrainedConfig, *, mixtures: bool = False) -> bool:
    """Whether cpu/fused.py and gpu/fused.py can compute a model of this config; `mixtures` too only where the latter is meant."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        (config.model_type in FAMILIES or (mixtures and config.model_type in MIXTURES))
        and getattr(config, "hidden_act", None) == "silu"
        and rope.get("rope_type", "default") in _ROPE_OF_POSITION
        and getattr(config, "partial_rotary_factor", 1.0) in (None, 1.0)
        and not getattr(config, "router_jitter_noise", 0.0)
    )


_FLOAT8_HEADS = (32, 64, 128, 256)
"""Sizes of a head that kernels for float8 pages take."""
_FLOAT8_SINCE = (8, 9)
"""The first compute capability whose GPUs turn float8 into float16."""


def check_small_cache(module: PreTrainedModel, rollout: RolloutConfig) -> None:
    """Raise ConfigError unless keys and values of this model can be kept in fewer bits where it is. It must have its weights."""
    check_small_cache_config(module.config, module.device.type, module.dtype, rollout)
    check_small_cache_capability(torch.cuda.get_device_capability(module.device), rollout)


def check_small_cache_capability(capability: tuple[int, int], rollout: RolloutConfig) -> None:
    """Raise ConfigError for a GPU that is too old."""
    if capability < _FLOAT8_SINCE:
        _refuse(rollout, "a GPU of compute capability 8.9 or newer", "this one has {}.{}".format(*capability))


def check_small_cache_config(config: PretrainedConfig, device_type: str, dtype: torch.dtype, rollout: RolloutConfig) -> None:
    """The same as far as it is known before anything is loaded; which models others than the native engine do it for is theirs to say."""
    family = config.model_type
    if device_type != "cuda":
        _refuse(rollout, "a GPU", f"the device is {device_type} (trainer.device)")
    if rollout.name != "native":
        return
    if dtype != torch.bfloat16:
        computed = str(dtype).removeprefix("torch.")
        found = f"this one does in {computed} (actor_rollout_ref.actor.fsdp_config.dtype)"
        _refuse(rollout, "a model that computes in bfloat16", found)
    if family not in FAMILIES + MIXTURES:
        _refuse(rollout, f"a model of the families {', '.join(FAMILIES + MIXTURES)}", f"this one is a {family}")
    if not is_fusable(config, mixtures=True):
        _refuse(rollout, "SiLU and rotary positions of a common kind", f"this {family} has others")
    sizes = [str(each) for each in _FLOAT8_HEADS]
    size = head_size(config.get_text_config())
    if str(size) not in sizes:
        _refuse(rollout, f"heads of {', '.join(sizes[:-1])} or {sizes[-1]} numbers", f"this model's have {size}")


def _refuse(rollout: RolloutConfig, needed: str, found: str) -> NoReturn:
    key = f"actor_rollout_ref.rollout.kv_cache_dtype={rollout.kv_cache_dtype}"
    raise ConfigError(f"{key} needs {needed}, and {found}; set it to auto")
