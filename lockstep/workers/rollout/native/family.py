"""The families of models whose decoder layer cpu/fused.py and gpu/fused.py compute by hand."""

from transformers import PreTrainedModel

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
