"""The families of models whose decoder layer cpu/fused.py and gpu/fused.py compute by hand."""

from transformers import PreTrainedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Norm, attention with rotary positions, norm, gated MLP."""
_ROPE_OF_POSITION = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone; the others also look at the longest sequence of the batch."""


def is_fusable(module: PreTrainedModel) -> bool:
    """Whether cpu/fused.py and gpu/fused.py can compute this model."""
    config = module.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in FAMILIES
        and getattr(config, "hidden_act", None) == "silu"
        and rope.get("rope_type", "default") in _ROPE_OF_POSITION
        and getattr(config, "partial_rotary_factor", 1.0) in (None, 1.0)
    )
