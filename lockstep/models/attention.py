"""Attention functions that plug into transformers' attention interface.

`PACKED` is for training and scoring: the rows of a micro-batch lie end to end in one sequence, and no row sees another.
`CACHED` is for decoding: new tokens read and extend a key-value cache that the native rollout engine owns.

Both receive query, key, value as [batch, heads, tokens, head_dim] (rotary embedding already applied) and return
([batch, tokens, heads, head_dim], None). transformers builds no mask for a name it does not know, so the layout travels as a keyword
argument of the model's forward. Legend: R rows, L longest row, N tokens, H query heads, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lockstep.errors import ConfigError

PACKED = "lockstep_packed"
CACHED = "lockstep_cached"

_UNSUPPORTED = ("softcap", "s_aux")
"""Keyword arguments of attention variants (logit soft-capping, attention sinks) that these functions do not compute."""


class PackedLayout:
    """Where the rows of a packed sequence lie, and the index that lifts them into a padded [R, L] block and back."""

    def __init__(self, lengths: Tensor, device: torch.device | str = "cpu") -> None:
        lengths = lengths.to("cpu", torch.int64)
        self.rows, self.longest = len(lengths), int(lengths.max())
        columns = torch.arange(self.longest)
        starts = torch.cumsum(lengths, 0) - lengths
        valid = columns < lengths[:, None]
        self.to_padded = (starts[:, None] + columns).where(valid, starts[:, None]).to(device)
        """[R, L]: for each padded place the token that fills it (padding repeats the row's first token; nothing reads it)."""
        self.to_packed = valid.flatten().nonzero().flatten().to(device)
        """[N]: for each token its place in the flattened padded block."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each row of a packed sequence (batch 1).

    The rows are padded on the right for this call only: under a causal mask a token never looks right, so padding needs no mask.
    """
    _refuse_unsupported(module, kwargs)
    q, k, v = (x[0][:, layout.to_padded].transpose(0, 1) for x in (query, key, value))  # [H, N, D] -> [R, H, L, D]
    mask = None
    if sliding_window is not None and layout.longest > sliding_window:
        distance = torch.arange(layout.longest, device=q.device)
        distance = distance[:, None] - distance[None, :]
        mask = (distance >= 0) & (distance < sliding_window)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    packed = out.transpose(1, 2).flatten(0, 1)[layout.to_packed]  # [N, H, D]
    return packed[None], None


class KeyValueCache(Protocol):
    """What `cached_attention` asks of the cache: remember these keys and values, and attend with these queries."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
    ) -> Tensor:
        """Store key and value of the new tokens, then return the attention output [batch, tokens, H, D]."""
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of new tokens over what `kv_cache` holds of their sequences."""
    _refuse_unsupported(module, kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return kv_cache.attend(layer, query, key, value, scaling, sliding_window), None


def _refuse_unsupported(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} uses attention with '{name}', which is not supported; choose another model")


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(CACHED, cached_attention)
