"""The families of models whose decoder layer cpu/fused.py and gpu/fused.py compute by hand, and what more gpu/float8.py wants of them."""

import torch
from transformers import PreTrainedModel

from lockstep.errors import ConfigError
from lockstep.models.flops import head_size

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Norm, attention with rotary positions, norm, gated MLP."""
MIXTURES = ("mixtral", "qwen3_moe")
"""The same with a mixture of experts in the place of the MLP, or of some: for gpu/fused.py."""
_ROPE_OF_POSITION = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone; the others also look at the longest sequence of the batch."""


def is_fusable(module: PreTrainedModel, *, mixtures: bool = False) -> bool:
    """Whether cpu/fused.py and gpu/fused.py can compute this model; `mixtures` too only where the latter is meant."""
    config = module.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        (config.model_type in FAMILIES or (mixtures and config.model_type in MIXTURES))
        and getattr(config, "hidden_act", None) == "silu"
        and rope.get("rope_type", "default") in _ROPE_OF_POSITION
        and getattr(config, "partial_rotary_factor", 1.0) in (None, 1.0)
        and not getattr(config, "router_jitter_noise", 0.0)
    )


_LEAST_HEAD = 32
"""The smallest head of gpu/float8.py; larger ones are powers of two."""
_FLOAT8_SINCE = (8, 9)
"""The first compute capability whose GPUs turn float8 into float16."""


def check_float8(module: PreTrainedModel) -> None:
    """Raise ConfigError unless keys and values of this model can be kept in eight bits where it is (rollout.kv_cache_dtype=fp8)."""
    size = head_size(module.config.get_text_config())
    if module.device.type != "cuda":
        found = f"the device is {module.device.type}"
    elif torch.cuda.get_device_capability(module.device) < _FLOAT8_SINCE:
        found = f"the GPU is an older one, of compute capability {torch.cuda.get_device_capability(module.device)}"
    elif not is_fusable(module, mixtures=True):
        found = f"the model is a {type(module).__name__}"
    elif module.dtype != torch.bfloat16:
        found = f"the model computes in {module.dtype} (actor_rollout_ref.actor.fsdp_config.dtype)"
    elif size < _LEAST_HEAD or size & (size - 1):
        found = f"its heads have {size} numbers"
    else:
        return
    raise ConfigError(
        "actor_rollout_ref.rollout.kv_cache_dtype=fp8 is for bfloat16 on a GPU of compute capability 8.9 or newer, models of the families "
        f"{', '.join(FAMILIES + MIXTURES)} with heads of 32, 64, 128 or 256 numbers, and {found}; set it to auto"
    )
