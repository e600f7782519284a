"""Tiny mixtures of experts."""

from typing import Any

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
"""Family -> what its tiny config has beside the shape of all (tiny.py)."""
