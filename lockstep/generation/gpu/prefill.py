"""Attention of new tokens that lie end to end in one packed sequence: whole prompts, or what follows a part that is in the cache."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.generation.gpu.float8 import pages_at
from lockstep.kernels.flash import FLASH_TYPES
from lockstep.models.attention import Variant, causal_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build of torch without it pads instead
    varlen_attn = None  # type: ignore[assignment]
_HAS_GQA = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether it must be told that key heads are fewer than query heads."""


class PromptRows:
    """Where the prompts of a packed sequence lie. Row i has `lengths[i]` new tokens after `contexts[i]` that are in the cache.

    `wanted` [any] int64 are the new tokens whose logits are wanted. `key_slots` [all tokens of all rows, cached and new] int64 says where
    their keys are; it is needed where a context is not 0.
    """

    def __init__(self, lengths: Sequence[int], contexts: Sequence[int], wanted: Tensor, key_slots: Tensor | None) -> None:
        self.lengths = list(lengths)
        self.wanted = wanted
        self.key_slots = key_slots
        self.ends = [c + n for c, n in zip(contexts, lengths, strict=True)]
        bounds = torch.tensor([[0, *lengths], [0, *self.ends]]).cumsum(1).int()
        # From pinned memory: a copy from other memory waits for all that the device has to do.
        self.bounds, self.key_bounds = upload(bounds, wanted.device)
        """[rows + 1] int32 each: where row i's new tokens, and all its tokens, begin."""


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor of the host, enqueued behind what the device has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Staged:
    """Host memory that is copied to `target` again and again. Pinned once: to pin memory for each copy takes as long as all else that the
    host does for a short prefill."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._buffers = [torch.empty(target.shape, dtype=target.dtype, pin_memory=target.is_cuda) for _ in range(2)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._copied: list[Any] = [torch.cuda.Event(), torch.cuda.Event()] if target.is_cuda else []
        """When the copy of each is done."""
        self._turn = 0

    def zeros(self, length: int) -> np.ndarray:
        """[length], to be filled and then sent."""
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        array: np.ndarray = self._arrays[self._turn][:length]
        array.fill(0)
        return array

    def send(self, length: int) -> None:
        """Copy it, behind what the device has to do."""
        self._target[:length].copy_(self._buffers[self._turn][:length], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()


def packed_prompt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: PromptRows,
    variant: Variant,
    scales: Tensor | None = None,
) -> Tensor:
    """[N, H, D]: causal attention inside each row; `query` [N, H, D], `key` and `value` [N, kv_heads, D], already stored in the pages
    (and rounded to them, where these have fewer bits: a prompt that is computed whole reads what one that is cut reads back).

    Flash attention on packed rows where it applies (half precision, no soft-cap, no sinks); else one row at a time.
    """
    if rows.key_slots is not None and scales is not None:
        key, value = pages_at(k_pages, v_pages, scales, rows.key_slots, query.dtype)
    elif rows.key_slots is not None:
        key, value = (pages.flatten(0, 1)[rows.key_slots] for pages in (k_pages, v_pages))
    if varlen_attn is not None and query.is_cuda and query.dtype in FLASH_TYPES and variant.is_plain:
        options: dict[str, Any] = {"window_size": ((variant.sliding_window or 0) - 1, 0), "scale": variant.scaling}
        if _HAS_GQA:
            options["enable_gqa"] = query.shape[1] != key.shape[1]
        longest = max(rows.lengths), max(rows.ends)
        return varlen_attn(query, key, value, rows.bounds, rows.key_bounds, *longest, **options)  # type: ignore[return-value]
    parts = zip(query.split(rows.lengths), key.split(rows.ends), value.split(rows.ends), strict=True)
    outputs = [causal_attention(*(x.transpose(0, 1)[None] for x in part), variant) for part in parts]  # type: ignore[call-arg]
    return torch.cat([out[0].transpose(0, 1) for out in outputs])
