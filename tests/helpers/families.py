"""Families of models that the native engine generates from, as changes to the tiny config (see helpers.tiny)."""

from __future__ import annotations

from typing import Any

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "gemma": {"head_dim": 8},
    # A window in every other layer, soft-capped scores and logits.
    "gemma2": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "phi": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    # Attention sinks.
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4},
    # Keys and values of different size.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
