"""A model as the prediction of its time sees it: counts, read from a model on the meta device."""

from dataclasses import dataclass

from lockstep.config.engine import ModelConfig
from lockstep.models.fast_layers import has_fast_layers
from lockstep.models.flops import ModelCost, head_size, mlp_width, model_cost
from lockstep.models.load import Head
from lockstep.planner.built import build


@dataclass(frozen=True)
class Shape:
    """The sizes of one model that decide how long it computes."""

    cost: ModelCost
    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    cache_numbers: int
    """Numbers of the key-value cache for one token."""
    head_size: int
    fast: bool
    """Whether the layers run as written in models/fast_layers.py."""

    def token_bytes(self, element: int, kept: str) -> int:
        """Keys and values of one token, for a `rollout.kv_cache_dtype`."""
        return cache_bytes(self.cache_numbers, self.head_size, element, kept)


def cache_bytes(numbers: int, head_size: int, element: int, kept: str) -> int:
    """Bytes of so many numbers of a key-value cache: `element` each, or fewer (`kept` is `rollout.kv_cache_dtype`).

    (vllm's float8 has no scales for heads; it is counted as if it had, 3 % more for heads of 64.)
    """
    if kept == "auto":
        return numbers * element
    # Key and value of a KV head in one byte each, or in one and a half, and four for their scales.
    return numbers // (2 * head_size) * ((2 * head_size if kept == "fp8" else head_size * 3 // 2) + 4)


def read_shape(model: ModelConfig, head: Head) -> Shape:
    """The shape of the model in `model.path`. Raises DataError where transformers cannot build it with this head."""
    module = build(model, head)
    text = module.config.get_text_config()
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return Shape(
        cost=model_cost(module),
        parameters=sum(p.numel() for p in module.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=mlp_width(text),
        vocabulary=text.vocab_size,
        cache_numbers=2 * text.num_hidden_layers * kv_heads * head_size(text),
        head_size=head_size(text),
        fast=has_fast_layers(module),
    )
