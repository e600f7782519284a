"""The key-value cache: one slot a running sequence, the same slots in every layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.models.attention import PackedLayout, packed_attention


class SlotCache:
    """Keys and values of up to `slots` sequences of up to `length` tokens; allocated a layer at a time, on first use.

    Before a forward pass the engine says which tokens come: `begin_prefill` (whole prompts, packed) or `begin_decode` (one token each).
    """

    def __init__(self, slots: int, length: int) -> None:
        self._shape = (slots, length)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._layout: PackedLayout | None = None

    def begin_prefill(self, slots: Tensor, lengths: Tensor, layout: PackedLayout) -> None:
        """Whole prompts of `lengths` [rows] follow, packed; they go to `slots` [rows]."""
        starts = torch.cumsum(lengths, 0) - lengths
        self._slot_of_token = torch.repeat_interleave(slots, lengths)
        self._place = torch.arange(int(lengths.sum()), device=slots.device) - torch.repeat_interleave(starts, lengths)
        self._layout = layout

    def begin_decode(self, slots: Tensor, positions: Tensor) -> None:
        """One token follows for each of `slots` [rows], at `positions` [rows] of its sequence."""
        self._layout = None
        self._slot_of_token, self._place = slots, positions
        self._longest = int(positions.max()) + 1
        reach = torch.arange(self._longest, device=slots.device)
        self._visible = (reach <= positions[:, None])[:, None, None, :]  # [rows, 1, 1, longest]
        self._all_slots = len(slots) == self._shape[0] and bool((slots == torch.arange(len(slots), device=slots.device)).all())

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
    ) -> Tensor:
        """See models.attention.KeyValueCache."""
        keys, values = self._layer(layer, key)
        if self._layout is not None:
            keys[self._slot_of_token, self._place] = key[0].transpose(0, 1)
            values[self._slot_of_token, self._place] = value[0].transpose(0, 1)
            out, _ = packed_attention(
                torch.nn.Module(), query, key, value, None, layout=self._layout, scaling=scaling, sliding_window=sliding_window
            )
            return out
        keys[self._slot_of_token, self._place] = key[:, :, 0]
        values[self._slot_of_token, self._place] = value[:, :, 0]
        slots = slice(None) if self._all_slots else self._slot_of_token
        seen_keys = keys[slots, : self._longest].transpose(1, 2)  # [rows, heads, longest, D]
        seen_values = values[slots, : self._longest].transpose(1, 2)
        visible = self._visible
        if sliding_window is not None:
            reach = torch.arange(self._longest, device=query.device)
            visible = visible & (reach > self._place[:, None] - sliding_window)[:, None, None, :]
        out = F.scaled_dot_product_attention(
            query, seen_keys, seen_values, attn_mask=visible, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)

    def _layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            shape = (*self._shape, like.shape[1], like.shape[3])
            self._layers[layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self._layers[layer]
