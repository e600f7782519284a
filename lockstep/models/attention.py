"""Attention functions that plug into transformers' attention interface.

`PACKED` is for training and scoring: the rows of a micro-batch lie end to end in one sequence, and no row sees another.
`CACHED` is for decoding: new tokens read and extend a key-value cache that the native rollout engine owns.

Both receive query, key, value as [batch, heads, tokens, head_dim] (rotary embedding already applied) and return
([batch, tokens, heads, head_dim], None). transformers builds no mask for a name it does not know, so the layout travels as a keyword
argument of the model's forward. Legend: R rows, L longest row, N tokens, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED = "lockstep_packed"
CACHED = "lockstep_cached"


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each row of a packed sequence (batch 1).

    The rows are padded on the right for this call only: under a causal mask a token never looks right, so padding needs no mask.
    """
    q, k, v = (x[0][:, layout.to_padded].transpose(0, 1) for x in (query, key, value))  # [H, N, D] -> [R, H, L, D]
    out = causal_attention(q, k, v, scaling, sliding_window, softcap, None if s_aux is None else s_aux.view(1, -1, 1, 1))
    packed = out.transpose(1, 2).flatten(0, 1)[layout.to_packed]  # [N, H, D]
    return packed[None], None


@dataclass(frozen=True, slots=True)
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
    layer: int = module.layer_idx  # type: ignore[assignment]
    # A cache has one head size. Zeros at the end of a key change no score; at the end of a value they are cut off again.
    value_dim, size = value.shape[-1], max(key.shape[-1], value.shape[-1])
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in (query, key, value))
    out = kv_cache.attend(layer, query, key, value, Variant(scaling, sliding_window, softcap, s_aux))
    return out[..., :value_dim], None


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [R, H, M, D] over k, v [R, H or fewer, L, D] whose last M tokens are the queries' own: [R, H, M, D]."""
    queries, keys = q.shape[2], k.shape[2]
    if queries == keys and (sliding_window is None or keys <= sliding_window) and softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    distance = torch.arange(keys - queries, keys, device=q.device)[:, None] - torch.arange(keys, device=q.device)
    mask = (distance >= 0) if sliding_window is None else (distance >= 0) & (distance < sliding_window)
    return masked_attention(q, k, v, mask, scaling, softcap, sinks)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [R, H, M, D] over k, v [R, H or fewer, L, D] where `mask` (to [R, H, M, L], boolean) allows: [R, H, M, D].

    `sinks` broadcasts to [R, H, M, 1].
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q, k.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register(CACHED, cached_attention)
