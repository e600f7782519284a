"""How many floating-point operations a model takes: matrix products and attention, a product of m x k by k x n being 2 m k n.

Norms, rotary embeddings, softmax and the embedding lookup are left out, as is what is computed twice to save memory: this is the work that
the model asks for, not what an implementation does. Causal attention counts the pairs of tokens that see each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

PEAK_FLOPS = {"B200": 2.25e15, "H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 operations a second by a part of the device's name (SXM parts where there are several)."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations a second of a GPU by its name (torch.cuda.get_device_name); None for one that is not known."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


@dataclass(frozen=True)
class ModelCost:
    """What one token costs, as counts that the functions below put together."""

    body: int
    """Weights that a token is multiplied with in the layers; of experts, those that a token goes through."""
    head: int
    """Weights of the output layer; 0 where it is part of the body (value and score heads)."""
    widths: int
    """Numbers in the queries and values of one token in one layer, all heads: what a pair of tokens is multiplied over."""
    windows: tuple[int | None, ...]
    """For each layer how many tokens back (itself included) a token sees; None sees all."""

    def forward(self, lengths: Sequence[int], head_tokens: int) -> float:
        """Operations of a forward pass over rows of these lengths, `head_tokens` of them through the output layer."""
        pairs = sum(visible_pairs(length, window) for window in self.windows for length in lengths)
        return 2.0 * (self.body * sum(lengths) + self.head * head_tokens + self.widths * pairs)

    def training(self, lengths: Sequence[int], head_tokens: int) -> float:
        """Forward and backward: a backward pass takes the gradient by both factors of every product."""
        return 3.0 * self.forward(lengths, head_tokens)


def visible_pairs(length: int, window: int | None = None) -> int:
    """How many (token, seen token) pairs a causal row has; a token sees itself and the `window` - 1 before it."""
    reach = length if window is None else min(window, length)
    return reach * (reach + 1) // 2 + (length - reach) * reach


def model_cost(model: PreTrainedModel) -> ModelCost:
    """The cost of a model, from its modules and its config. Call it before the model is sharded."""
    config = model.config.get_text_config()
    output = model.get_output_embeddings()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    body = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is output:
            continue
        for weight in module.parameters(recurse=False):
            if weight.dim() == 2:
                body += weight.numel()
            elif weight.dim() == 3:  # experts side by side
                body += weight.numel() // weight.shape[0] * chosen
    heads = config.num_attention_heads
    sizes = _head_sizes(config)
    size = sum(sizes) // len(sizes)
    value_size = getattr(config, "v_head_dim", None) or size
    if getattr(config, "qk_nope_head_dim", None):
        size = config.qk_nope_head_dim + config.qk_rope_head_dim
    return ModelCost(
        body=body,
        head=output.weight.numel() if output is not None else 0,
        widths=heads * (size + value_size),
        windows=_windows(config),
    )


def head_size(config: Any) -> int:
    """Return how many numbers one attention head of a model with this text config has; the most, where layers differ."""
    return max(_head_sizes(config))


def _head_sizes(config: Any) -> list[int]:
    """The sizes of the heads, by layer where layers differ (Gemma 4); else one."""
    layers = getattr(config, "per_layer_config", None)
    configs = [config] if layers is None else [layers[number] for number in range(config.num_hidden_layers)]
    return [getattr(each, "head_dim", None) or each.hidden_size // each.num_attention_heads for each in configs]


def mlp_width(config: Any) -> int:
    """Numbers inside the MLP of a layer for one token, with this text config; of a mixture, those of the experts that it goes through."""
    width = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    chosen = getattr(config, "num_experts_per_tok", None)
    if not chosen:
        return width
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return chosen * (getattr(config, "moe_intermediate_size", None) or width) + shared


def _windows(config: object) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    layers: int = config.num_hidden_layers  # type: ignore[attr-defined]
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        in_use = getattr(config, "use_sliding_window", True)
        return ((window if in_use else None),) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
