"""The names of weights: torchtitan's and Hugging Face's, one to one (q, k and v are not fused, and the rotary embedding is the same)."""

import re

_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_IN_LAYER = {
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_AROUND = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm"}
_RECOMPUTED = "_checkpoint_wrapped_module."


def hf_name(name: str, head: str) -> str:
    """The Hugging Face name of a torchtitan parameter. `head` is that of the output layer: lm_head, score, or a tied embedding's."""
    name = name.replace(_RECOMPUTED, "")
    layer = _LAYER.fullmatch(name)
    if layer:
        number, part, kind = layer.groups()
        return f"model.layers.{number}.{_IN_LAYER[part]}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"{(_AROUND | {'lm_head': head})[part]}.{kind}"
