"""Attention for training and scoring, as a function that plugs into transformers' attention interface.

The rows of a micro-batch lie end to end in one sequence, and no row sees another. Rows of the same prompt may share it: the prompt is one
segment, and each response a segment that continues it. (Attention for decoding is in cached_attention.py.)

It gets query, key, value as [batch, heads, tokens, head_dim] (rotary embedding already applied) and returns
([batch, tokens, heads, head_dim], None). transformers builds no mask for a name it does not know, so the layout travels as a keyword
argument of the model's forward. Legend: R rows, S segments, L longest of them, N tokens, H query heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lockstep.kernels import flash
from lockstep.kernels.flash import Bounds
from lockstep.models import ulysses
from lockstep.models.cached_attention import Variant, check_call
from lockstep.models.masked_attention import masked_attention

PACKED = "lockstep_packed"


class PackedLayout:
    """Where the segments of a packed sequence lie, and what each sees: itself up to the token, and all of the segment it continues.

    `lengths` [S] are those of the segments in order. The first len(`followers`) of them are shared: `followers[i]` of the later ones,
    in order, each continue segment i. Without followers every segment stands alone.
    """

    flash: Any = None
    """What packed_flash.py keeps for it."""
    group: dist.ProcessGroup | None = None
    """The ranks that have an equal part of the tokens each, in order, filled up at the end; None where this rank has them all."""

    def __init__(self, lengths: Tensor, device: torch.device | str = "cpu", followers: Sequence[int] = ()) -> None:
        self.lengths = lengths.to("cpu", torch.int64)
        self.num_shared, self.device = len(followers), device
        counts = torch.tensor(list(followers), dtype=torch.int64)
        assert not followers or int(counts.sum()) == len(lengths) - len(followers), "every later segment continues a shared one"
        self.continued = torch.repeat_interleave(torch.arange(self.num_shared), counts).tolist()
        """For each segment after the shared ones the number of the one it continues."""
        own = self.lengths.tolist()
        before = [0] * self.num_shared + [own[i] for i in self.continued] if followers else [0] * len(own)
        self.longest = max(a + b for a, b in zip(before, own, strict=True))
        """Tokens of the longest sequence."""
        self.num_tokens, self.num_shared_tokens = sum(own), sum(own[: self.num_shared])
        bounds = _bounds(self.lengths).to(device, non_blocking=True)
        self.own = Bounds(bounds, bounds, max(own), max(own))
        self.shared: Bounds | None = None
        if followers:
            shared = self.lengths[: self.num_shared]
            readers = torch.stack([part.sum() for part in self.lengths[self.num_shared :].split(counts.tolist())])
            query, key = (_bounds(part).to(device, non_blocking=True) for part in (readers, shared))
            self.shared = Bounds(query, key, int(readers.max()), int(shared.max()))

    def divided(self, group: dist.ProcessGroup) -> PackedLayout:
        """The same layout for ranks that have a part of the tokens each."""
        layout = copy.copy(self)
        layout.group = group
        return layout

    @property
    def wastes_little(self) -> bool:
        """Whether the segments padded to the longest are at most twice the tokens."""
        return len(self.lengths) * self.own.longest_query <= 2 * self.num_tokens

    @cached_property
    def to_padded(self) -> Tensor:
        """[S, L]: for each padded place the token that fills it (padding repeats the segment's first token; nothing reads it)."""
        starts, valid = self._places()
        return (starts + torch.arange(valid.shape[1])).where(valid, starts).to(self.device)

    @cached_property
    def to_packed(self) -> Tensor:
        """[N]: for each token its place in the flattened padded block."""
        return self._places()[1].flatten().nonzero().flatten().to(self.device)

    def _places(self) -> tuple[Tensor, Tensor]:
        starts = (torch.cumsum(self.lengths, 0) - self.lengths)[:, None]
        return starts, torch.arange(self.own.longest_query) < self.lengths[:, None]


def _bounds(lengths: Tensor) -> Tensor:
    return F.pad(torch.cumsum(lengths, 0), (1, 0)).to(torch.int32)


@torch.compiler.disable  # layouts differ from one micro-batch to the next
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
    """Causal attention inside each segment of a packed sequence (batch 1), and over the segment that it continues.

    Flash attention without padding on a GPU in half precision. Elsewhere one segment at a time; or all at once where they are of
    about the same length and stand alone, padded on the right for this call only: under a causal mask a token never looks right.
    Where the layout divides the tokens among ranks, each attends with a part of the heads (models/ulysses.py).
    """
    check_call(module, query, key, value, attention_mask, kwargs)
    group = layout.group
    if group is not None:
        query, key, value = ulysses.heads_for_tokens(query, key, value, layout.num_tokens, group)
        s_aux = None if s_aux is None else s_aux.chunk(group.size())[group.rank()]  # of its own heads
    window = sliding_window if sliding_window is not None and layout.longest > sliding_window else None
    out = _attend(query, key, value, layout, Variant(scaling, window, softcap, s_aux))
    out = out if group is None else ulysses.tokens_for_heads(out, group)
    return out.contiguous(), None  # some families call view on it


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, variant: Variant) -> Tensor:
    """[1, N, H, D] from [1, H, N, D], all tokens being here."""
    window = variant.sliding_window
    if query.is_cuda and variant.is_plain and (window is None or layout.shared is None) and flash.applies(query, value):
        from lockstep.models.packed_flash import attend

        # (The gradient of x[0] would be a copy.)
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return attend(q, k, v, layout, variant.scaling, window)[None]
    if layout.shared is None and layout.wastes_little:
        q, k, v = (x[0][:, layout.to_padded].transpose(0, 1) for x in (query, key, value))  # [H, N, D] -> [S, H, L, D]
        out = causal_attention(q, k, v, variant)
        return out.transpose(1, 2).flatten(0, 1)[layout.to_packed][None]
    return _one_segment_at_a_time(query, key, value, layout, variant).transpose(1, 2)


def _one_segment_at_a_time(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, variant: Variant) -> Tensor:
    sizes = layout.lengths.tolist()
    queries, keys, values = (x.split(sizes, dim=2) for x in (query, key, value))
    outputs = []
    for segment in range(len(sizes)):
        seen = [segment]
        if layout.shared is not None and segment >= layout.num_shared:
            seen = [layout.continued[segment - layout.num_shared], segment]
        k, v = (torch.cat([parts[i] for i in seen], dim=2) for parts in (keys, values))
        outputs.append(causal_attention(queries[segment], k, v, variant))
    return torch.cat(outputs, dim=2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    """Attention of q [R, H, M, D] over k, v [R, H or fewer, L, D] whose last M tokens are the queries' own: [R, H, M, D]."""
    queries, keys, window = q.shape[2], k.shape[2], variant.sliding_window
    if queries == keys and (window is None or keys <= window) and variant.is_plain:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=variant.scaling, enable_gqa=q.shape[1] != k.shape[1])
    distance = torch.arange(keys - queries, keys, device=q.device)[:, None] - torch.arange(keys, device=q.device)
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return masked_attention(q, k, v, mask, variant)


AttentionInterface.register(PACKED, packed_attention)
