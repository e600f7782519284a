"""Attention for decoding, as a function that plugs into transformers' attention interface (see attention.py): new tokens read and extend
a key-value cache that the native rollout engine owns. Legend: H query heads, D head size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from lockstep.errors import ConfigError

CACHED = "lockstep_cached"


@dataclass(frozen=True)
class Variant:
    """How one layer attends, beside its queries, keys and values."""

    scaling: float | None = None
    """Multiplies the scores; None means 1 / sqrt(D)."""
    sliding_window: int | None = None
    """A token sees itself and the `sliding_window` - 1 tokens before it; None sees all."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None
    """[H]: a score of each head that takes part in the softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        """Whether the softmax is over the scores as they are."""
        return self.softcap is None and self.sinks is None


class KeyValueCache(Protocol):
    """What `cached_attention` asks of the cache: remember these keys and values, and attend with these queries."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        """Store key and value of the new tokens, then return the attention output [batch, tokens, H, D]. All have one head size D."""
        ...


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv_cache: KeyValueCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of new tokens over what `kv_cache` holds of their sequences."""
    check_call(module, query, key, value, attention_mask, kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]
    # A cache has one head size. Zeros at the end of a key change no score; at the end of a value they are cut off again.
    value_dim, size = value.shape[-1], max(key.shape[-1], value.shape[-1])
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in (query, key, value))
    out = kv_cache.attend(layer, query, key, value, Variant(scaling, sliding_window, softcap, s_aux))
    return out[..., :value_dim], None


def check_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, others: Mapping[str, Any]
) -> None:
    """Raise ConfigError unless each new token has one key and one value, and causality and a window are all that hides keys.

    Models that add compressed keys, or choose which keys a token sees, would be computed wrongly, or write outside the cache.
    """
    name = type(module).__name__
    if not query.shape[2] == key.shape[2] == value.shape[2]:
        raise ConfigError(
            f"{name} attends with {query.shape[2]} queries to {key.shape[2]} keys and {value.shape[2]} values; one key and one value per "
            "token are needed"
        )
    if attention_mask is not None:
        shape = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ConfigError(f"{name} hides keys by a mask of its own ({shape}); only causal masks with a window are computed")
    chosen = [key for key in others if key.endswith("indices") and others[key] is not None]
    if chosen:
        raise ConfigError(f"{name} chooses the keys that a token sees ({chosen[0]}); only causal masks with a window are computed")


AttentionInterface.register(CACHED, cached_attention)


def sliding_window(module: PreTrainedModel, attention: nn.Module) -> int | None:
    """How far a layer of it looks back. Qwen's layers say it themselves, Mistral's and Mixtral's read the config, Llama's have none."""
    whole = module.config.sliding_window if module.config.model_type in ("mistral", "mixtral") else None
    return getattr(attention, "sliding_window", whole)
