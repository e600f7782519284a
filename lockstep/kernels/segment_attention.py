# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Flash attention over packed segments, where a segment may also see all of one before it, in one pass over both.

A tile is a run of tokens of one segment. Its queries see the segment's keys up to their own, and all keys of the segment that it continues
(`before`); its keys are seen by the segment's later queries, and by all queries of those that continue it (`after`), which lie end to end.
A program has one tile and one head, and the gradient of a key is summed over the query heads that share it in their order: nothing is
added to by two programs, so that results are the same bits each time. Scores are in units of log2.
Legend: N tokens, S segments, H query heads, K key-value heads, D head size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


# -- kernels -----------------------------------------------------------------------------------------------------------------


@triton.jit
def _load(X, tokens, inside, head, heads, D: tl.constexpr, MASKED: tl.constexpr = True):
    """[tokens, D] of one head of X [N, heads, D]; 0 where not `inside`."""
    at = (tokens.to(tl.int64) * heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    if MASKED:
        return tl.load(X + at, mask=inside[:, None], other=0.0)
    return tl.load(X + at)


@triton.jit
def _attend_block(
    q, K, V, tokens, inside, queries, kv_head, kv_heads, scale, total, largest, out,
    D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = _load(K, tokens, inside, kv_head, kv_heads, D, MASKED)
    s = tl.dot(q, tl.trans(k)) * scale
    if CAUSAL:
        s = tl.where(queries[:, None] >= tokens[None, :], s, float("-inf"))
    elif MASKED:
        s = tl.where(inside[None, :], s, float("-inf"))
    higher = tl.maximum(largest, tl.max(s, 1))
    p = tl.math.exp2(s - higher[:, None])
    keep = tl.math.exp2(largest - higher)
    total = total * keep + tl.sum(p, 1)
    v = _load(V, tokens, inside, kv_head, kv_heads, D, MASKED)
    out = out * keep[:, None] + tl.dot(p.to(v.dtype), v)
    return total, higher, out


@triton.jit(do_not_specialize=["num_tokens"])
def forward_kernel(
    Q, K, V, OUT, LSE, TILES, scale, num_tokens, heads, kv_heads, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """OUT [N, H, D] and LSE [H, N]. TILES is `Segments.tiles`."""
    tile, head = TILES + tl.program_id(0) * 8, tl.program_id(1)
    first, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    before, before_end = tl.load(tile + 3), tl.load(tile + 4)
    kv_head = head // (heads // kv_heads)
    queries = first + tl.arange(0, BM)
    valid = queries < end
    q = _load(Q, queries, valid, head, heads, D)
    total, largest = tl.zeros((BM,), tl.float32), tl.full((BM,), float("-inf"), tl.float32)
    out = tl.zeros((BM, D), tl.float32)
    for block in range(before, before_end, BN):
        tokens = block + tl.arange(0, BN)
        total, largest, out = _attend_block(
            q, K, V, tokens, tokens < before_end, queries, kv_head, kv_heads, scale, total, largest, out, D, False, True
        )  # fmt: skip
    for block in range(start, first, BN):  # whole blocks, since BN divides BM
        tokens = block + tl.arange(0, BN)
        total, largest, out = _attend_block(
            q, K, V, tokens, tokens < end, queries, kv_head, kv_heads, scale, total, largest, out, D, False, False
        )  # fmt: skip
    for block in range(first, tl.minimum(first + BM, end), BN):
        tokens = block + tl.arange(0, BN)
        total, largest, out = _attend_block(
            q, K, V, tokens, tokens < end, queries, kv_head, kv_heads, scale, total, largest, out, D, True, True
        )  # fmt: skip
    at = (queries.to(tl.int64) * heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(OUT + at, (out / total[:, None]).to(OUT.dtype.element_ty), mask=valid[:, None])
    tl.store(LSE + queries.to(tl.int64) + head * num_tokens, largest + tl.math.log2(total), mask=valid)


@triton.jit
def _query_block(
    q, do, K, V, lse, delta, tokens, inside, queries, kv_head, kv_heads, scale, dq,
    D: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = _load(K, tokens, inside, kv_head, kv_heads, D, MASKED)
    v = _load(V, tokens, inside, kv_head, kv_heads, D, MASKED)
    p = tl.math.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    if CAUSAL:
        p = tl.where(queries[:, None] >= tokens[None, :], p, 0.0)
    elif MASKED:
        p = tl.where(inside[None, :], p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return dq + tl.dot(ds.to(k.dtype), k)


@triton.jit(do_not_specialize=["num_tokens"])
def query_gradient_kernel(
    Q, K, V, OUT, DOUT, LSE, DELTA, DQ, TILES, scale, factor, num_tokens, heads, kv_heads,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """DQ [N, H, D], and DELTA [H, N], the product of output and its gradient at each query. `factor` is the scale of the scores."""
    tile, head = TILES + tl.program_id(0) * 8, tl.program_id(1)
    first, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    before, before_end = tl.load(tile + 3), tl.load(tile + 4)
    kv_head = head // (heads // kv_heads)
    queries = first + tl.arange(0, BM)
    valid = queries < end
    q = _load(Q, queries, valid, head, heads, D)
    do = _load(DOUT, queries, valid, head, heads, D)
    out = _load(OUT, queries, valid, head, heads, D)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    row = queries.to(tl.int64) + head * num_tokens
    tl.store(DELTA + row, delta, mask=valid)
    lse = tl.load(LSE + row, mask=valid, other=0.0)
    dq = tl.zeros((BM, D), tl.float32)
    for block in range(before, before_end, BN):
        tokens = block + tl.arange(0, BN)
        dq = _query_block(
            q, do, K, V, lse, delta, tokens, tokens < before_end, queries, kv_head, kv_heads, scale, dq, D, False, True
        )
    for block in range(start, first, BN):
        tokens = block + tl.arange(0, BN)
        dq = _query_block(q, do, K, V, lse, delta, tokens, tokens < end, queries, kv_head, kv_heads, scale, dq, D, False, False)
    for block in range(first, tl.minimum(first + BM, end), BN):
        tokens = block + tl.arange(0, BN)
        dq = _query_block(q, do, K, V, lse, delta, tokens, tokens < end, queries, kv_head, kv_heads, scale, dq, D, True, True)
    at = (queries.to(tl.int64) * heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(DQ + at, (dq * factor).to(DQ.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _key_block(
    k, v, Q, DOUT, LSE, DELTA, queries, valid, tokens, head, heads, num_tokens, scale, dk, dv, D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    q = _load(Q, queries, valid, head, heads, D)
    do = _load(DOUT, queries, valid, head, heads, D)
    row = queries.to(tl.int64) + head * num_tokens
    lse = tl.load(LSE + row, mask=valid, other=float("inf"))  # no probability where there is no query
    p = tl.math.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])  # [keys, queries]
    if CAUSAL:
        p = tl.where(queries[None, :] >= tokens[:, None], p, 0.0)
    dv += tl.dot(p.to(do.dtype), do)
    delta = tl.load(DELTA + row, mask=valid, other=0.0)
    ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
    return dk + tl.dot(ds.to(q.dtype), q), dv


@triton.jit(do_not_specialize=["num_tokens", "num_shared"])
def shared_key_gradient_kernel(
    Q, K, V, DOUT, LSE, DELTA, PARTS, TILES, scale, num_tokens, num_shared, heads, kv_heads,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """PARTS [H, 2, shared tokens, D]: what the queries of one head, in the segments after, add to the gradients of shared keys and
    values. A shared segment has many more queries than others: the heads of a key are apart, and `key_gradient_kernel` adds them up."""
    tile, head = TILES + tl.program_id(0) * 8, tl.program_id(1)
    first, end = tl.load(tile), tl.load(tile + 2)
    after, after_end = tl.load(tile + 5), tl.load(tile + 6)
    kv_head = head // (heads // kv_heads)
    tokens = first + tl.arange(0, BN)
    inside = tokens < end
    k = _load(K, tokens, inside, kv_head, kv_heads, D)
    v = _load(V, tokens, inside, kv_head, kv_heads, D)
    dk, dv = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    for block in range(after, after_end, BM):
        queries = block + tl.arange(0, BM)
        dk, dv = _key_block(
            k, v, Q, DOUT, LSE, DELTA, queries, queries < after_end, tokens, head, heads, num_tokens, scale, dk, dv, D, False
        )  # fmt: skip
    at = (head * 2 * num_shared + tokens.to(tl.int64))[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(PARTS + at, dk, mask=inside[:, None])
    tl.store(PARTS + at + num_shared * D, dv, mask=inside[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_shared"])
def key_gradient_kernel(
    Q, K, V, DOUT, LSE, DELTA, PARTS, DK, DV, TILES, scale, factor, num_tokens, num_shared, heads, kv_heads,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """DK and DV [N, K, D]."""
    tile, kv_head = TILES + tl.program_id(0) * 8, tl.program_id(1)
    first, end = tl.load(tile), tl.load(tile + 2)
    tokens = first + tl.arange(0, BN)
    inside = tokens < end
    k = _load(K, tokens, inside, kv_head, kv_heads, D)
    v = _load(V, tokens, inside, kv_head, kv_heads, D)
    dk, dv = tl.zeros((BN, D), tl.float32), tl.zeros((BN, D), tl.float32)
    group = heads // kv_heads
    for head in range(kv_head * group, kv_head * group + group):
        if first < num_shared:
            at = (head * 2 * num_shared + tokens.to(tl.int64))[:, None] * D + tl.arange(0, D)[None, :]
            dk += tl.load(PARTS + at, mask=inside[:, None], other=0.0)
            dv += tl.load(PARTS + at + num_shared * D, mask=inside[:, None], other=0.0)
        for block in range(first, tl.minimum(first + BN, end), BM):
            queries = block + tl.arange(0, BM)
            dk, dv = _key_block(
                k, v, Q, DOUT, LSE, DELTA, queries, queries < end, tokens, head, heads, num_tokens, scale, dk, dv, D, True
            )  # fmt: skip
        for block in range(first + BN, end, BM):
            queries = block + tl.arange(0, BM)
            dk, dv = _key_block(
                k, v, Q, DOUT, LSE, DELTA, queries, queries < end, tokens, head, heads, num_tokens, scale, dk, dv, D, False
            )  # fmt: skip
    at = (tokens.to(tl.int64) * kv_heads + kv_head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(DK + at, (dk * factor).to(DK.dtype.element_ty), mask=inside[:, None])
    tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=inside[:, None])


# -- launching them ----------------------------------------------------------------------------------------------------------


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
        forward_kernel[(len(tiles), heads)](
            query, key, value, out, lse, tiles, scale * LOG2_E, tokens, heads, key.shape[1],
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
        query_gradient_kernel[(len(tiles), heads)](
            query, key, value, out, grad, lse, delta, dq, tiles, scale * LOG2_E, scale, *sizes,
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
        shared_key_gradient_kernel[(segments.num_shared_tiles(blocks.tile), heads)](
            query, key, value, grad, lse, delta, parts, tiles, scale * LOG2_E, tokens, shared, heads, kv_heads,
            D=size, BM=blocks.step, BN=blocks.tile, **options,
        )  # fmt: skip
    key_gradient_kernel[(len(tiles), kv_heads)](
        query, key, value, grad, lse, delta, parts, dk, dv, tiles, scale * LOG2_E, scale, tokens, shared, heads, kv_heads,
        D=size, BM=blocks.step, BN=blocks.tile, **options,
    )  # fmt: skip
