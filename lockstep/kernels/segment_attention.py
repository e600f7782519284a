"""Attention over packed segments by the kernels of segments.py, with its gradient.

Legend: N tokens, S segments, H query heads, K key-value heads, D head size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels import segments as kernels


class Blocks(NamedTuple):
    """How a kernel is cut: tokens of a tile, tokens of what it walks over, warps, stages."""

    tile: int
    step: int
    warps: int
    stages: int


FORWARD = {64: Blocks(64, 32, 4, 3), 128: Blocks(64, 64, 4, 3)}
QUERIES = {64: Blocks(64, 64, 4, 2), 128: Blocks(64, 32, 4, 3)}
KEYS = {64: Blocks(128, 32, 4, 2), 128: Blocks(64, 64, 4, 2)}
"""By head size, the fastest of seven each on an H200 (`python -m benchmarks.attention` has what they reach)."""


class Segments:
    """Where segments of `lengths` [S] lie; the first len(`followers`) of them are shared, and `followers[i]` of the later ones continue
    segment i, in order."""

    def __init__(self, lengths: Sequence[int], followers: Sequence[int], device: torch.device | str) -> None:
        ends = torch.tensor(lengths).cumsum(0)
        starts = ends - torch.tensor(lengths)
        before, after = torch.zeros(len(lengths), 2, dtype=torch.int64), torch.zeros(len(lengths), 2, dtype=torch.int64)
        first = len(followers)
        for shared, count in enumerate(followers):
            if count:
                before[first : first + count] = torch.stack([starts[shared], ends[shared]])
                after[shared] = torch.stack([starts[first], ends[first + count - 1]])
            first += count
        self._segments, self._shared_lengths = torch.stack([starts, ends, *before.T, *after.T], 1), lengths[: len(followers)]
        self.num_shared_tokens = sum(self._shared_lengths)
        self._device, self._tiles = device, dict[int, Tensor]()

    def tiles(self, size: int) -> Tensor:
        """[tiles, 8] int32: first token of each tile of `size` tokens, bounds of its segment, of the one before, of those after; 0."""
        if size not in self._tiles:
            starts, ends = self._segments[:, 0], self._segments[:, 1]
            counts = -(-(ends - starts) // size)
            segment = torch.repeat_interleave(counts)
            place = torch.arange(len(segment)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
            table = torch.zeros(len(segment), 8, dtype=torch.int32)
            table[:, 0] = starts[segment] + size * place
            table[:, 1:7] = self._segments[segment]
            self._tiles[size] = table.to(self._device, non_blocking=True)
        return self._tiles[size]

    def num_shared_tiles(self, size: int) -> int:
        """How many of `tiles` are of shared segments; they come first."""
        return sum(-(-length // size) for length in self._shared_lengths)


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """Causal attention inside each segment, and over all of the one that it continues: [N, H, D] from query [N, H, D], key and value
    [N, K, D]."""
    return _Attend.apply(query.contiguous(), key.contiguous(), value.contiguous(), segments, scale)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
        tokens, heads, size = query.shape
        scale = size**-0.5 if scale is None else scale
        blocks = FORWARD[size]
        tiles = segments.tiles(blocks.tile)
        out, lse = torch.empty_like(query), torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
        kernels.forward[(len(tiles), heads)](
            query, key, value, out, lse, tiles, scale * kernels.LOG2_E, tokens, heads, key.shape[1],
            D=size, BM=blocks.tile, BN=blocks.step, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        segments, scale = ctx.options
        tokens, heads, size = query.shape
        grad, delta = grads[0].contiguous(), torch.empty_like(lse)
        dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        sizes = tokens, heads, key.shape[1]
        blocks = QUERIES[size]
        tiles = segments.tiles(blocks.tile)
        kernels.query_gradient[(len(tiles), heads)](
            query, key, value, out, grad, lse, delta, dq, tiles, scale * kernels.LOG2_E, scale, *sizes,
            D=size, BM=blocks.tile, BN=blocks.step, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        _key_gradient(query, key, value, grad, lse, delta, dk, dv, segments, scale)
        return dq, dk, dv, None, None


def _key_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    segments: Segments,
    scale: float,
) -> None:
    """Fill `dk` and `dv`."""
    tokens, heads, size = query.shape
    blocks, shared, kv_heads = KEYS[size], segments.num_shared_tokens, key.shape[1]
    tiles, options = segments.tiles(blocks.tile), {"num_warps": blocks.warps, "num_stages": blocks.stages}
    parts = torch.empty(heads, 2, shared, size, dtype=torch.float32, device=query.device)
    if shared:
        kernels.shared_key_gradient[(segments.num_shared_tiles(blocks.tile), heads)](
            query, key, value, grad, lse, delta, parts, tiles, scale * kernels.LOG2_E, tokens, shared, heads, kv_heads,
            D=size, BM=blocks.step, BN=blocks.tile, **options,
        )  # fmt: skip
    kernels.key_gradient[(len(tiles), kv_heads)](
        query, key, value, grad, lse, delta, parts, dk, dv, tiles, scale * kernels.LOG2_E, scale, tokens, shared, heads, kv_heads,
        D=size, BM=blocks.step, BN=blocks.tile, **options,
    )  # fmt: skip
