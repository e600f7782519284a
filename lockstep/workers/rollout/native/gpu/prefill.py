"""Attention of new tokens that lie end to end in one packed sequence: whole prompts, or what follows a part that is in the cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.models.attention import causal_attention
from lockstep.models.cached_attention import Variant
from lockstep.models.flash import FLASH_TYPES

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build of torch without it pads instead
    varlen_attn = None  # type: ignore[assignment]


class PromptRows:
    """Where the prompts of a packed sequence lie. Row i has `lengths[i]` new tokens after `contexts[i]` that are in the cache.

    `key_slots` [all tokens of all rows, cached and new] int64 says where their keys are; it is needed where a context is not 0.
    """

    def __init__(self, lengths: Sequence[int], contexts: Sequence[int], key_slots: Tensor | None, device: torch.device) -> None:
        self.lengths, self.contexts, self.key_slots = list(lengths), list(contexts), key_slots
        self.ends = [c + n for c, n in zip(contexts, lengths, strict=True)]
        bounds = torch.tensor([[0, *lengths], [0, *self.ends]], dtype=torch.int64).cumsum(1)
        self.bounds, self.key_bounds = bounds.to(device, torch.int32)
        """[rows + 1] int32 each: where row i's new tokens, and all its tokens, begin."""
        self.last = (bounds[0, 1:] - 1).to(device)
        """[rows] int64: each row's last token."""


def packed_prompt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: PromptRows,
    variant: Variant,
) -> Tensor:
    """[N, H, D]: causal attention inside each row; `query` [N, H, D], `key` and `value` [N, kv_heads, D], already stored in the pages.

    Flash attention on packed rows where it applies (half precision, no soft-cap, no sinks); else one row at a time.
    """
    if rows.key_slots is not None:
        key, value = (pages.flatten(0, 1)[rows.key_slots] for pages in (k_pages, v_pages))
    if varlen_attn is not None and query.is_cuda and query.dtype in FLASH_TYPES and variant.is_plain:
        options: dict[str, Any] = {"window_size": ((variant.sliding_window or 0) - 1, 0), "scale": variant.scaling}
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = query.shape[1] != key.shape[1]
        longest = max(rows.lengths), max(rows.ends)
        return varlen_attn(query, key, value, rows.bounds, rows.key_bounds, *longest, **options)  # type: ignore[return-value]
    parts = zip(query.split(rows.lengths), key.split(rows.ends), value.split(rows.ends), strict=True)
    outputs = [causal_attention(*(x.transpose(0, 1)[None] for x in part), variant) for part in parts]  # type: ignore[call-arg]
    return torch.cat([out[0].transpose(0, 1) for out in outputs])
