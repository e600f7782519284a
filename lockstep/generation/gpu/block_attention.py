# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Attention of neighbouring new tokens of one sequence over its pages (Triton): what they have in common is read once for all of them.

As in attention.py, whose layout this is; but a program computes a block of tokens instead of one, so it takes the place of flash attention
where a prefill is captured (short_prefill.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.generation.gpu.attention import join_splits, num_splits
from lockstep.generation.gpu.float8 import packed_scales
from lockstep.generation.gpu.tiles import head_start, keys_at, scales_at, values_at

_QUERIES = 64
"""Queries of one KV head that a program has, at most."""
_MOST_TOKENS = 8


def block_size(heads: int, kv_heads: int) -> int:
    """How many tokens a block has: a power of two."""
    return min(_MOST_TOKENS, 1 << (max(1, _QUERIES * kv_heads // heads).bit_length() - 1))


def block_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    splits: int | None = None,
    scales: Tensor | None = None,
    kept: str = "auto",
) -> Tensor:
    """[rows, H, D]: softmax(scale q.k) v over tokens 0..context of each row, whose keys and values are all stored.

    `query` [rows, H, D] and `context_lens` [rows] are of tokens; `page_table` [blocks, width] is of blocks of rows / blocks tokens each,
    which belong to one sequence and follow each other. `window` keeps the last so many tokens. `splits` overrides `num_splits` (tests).
    """
    rows, heads, dim = query.shape
    blocks = len(page_table)
    page_size = k_pages.shape[1]
    kv_heads = k_pages.shape[2]
    tokens = rows // blocks
    group = heads // kv_heads
    splits = num_splits(blocks, kv_heads) if splits is None else splits
    out = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    padded = max(16, triton.next_power_of_2(dim))
    part = part_max = part_sum = out
    if splits > 1:
        part = torch.empty(splits, rows, heads, dim, dtype=torch.float32, device=query.device)
        part_max, part_sum = torch.empty(2, splits, rows, heads, dtype=torch.float32, device=query.device)
    queries = max(16, triton.next_power_of_2(tokens * group))
    _attend_block[(blocks, kv_heads, splits)](
        query, k_pages, v_pages, packed_scales(scales, query), page_table, context_lens, out, part, part_max, part_sum,
        query.stride(0), query.stride(1), page_table.stride(0), scale, window or 0,
        TOKENS=tokens, KV_HEADS=kv_heads, GROUP=group, ROWS=queries, D=dim, DP=padded,
        PAGE=page_size, TILE=max(16, min(page_size, 16384 // (padded * query.element_size()))), SPLITS=splits,
        WINDOW=window is not None, EXACT=query.dtype == torch.float32, KEPT=kept,
        num_warps=4 if queries <= 64 else 8, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        join_splits(part, part_max, part_sum, out)
    return out


@triton.jit
def _attend_block(
    Q, KP, VP, SCALES, TABLE, CONTEXT, OUT, PART, PART_MAX, PART_SUM, stride_q, stride_qh, stride_table, scale, window,
    TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    t = tl.arange(0, TILE)
    inside = r < TOKENS * GROUP
    row = block * TOKENS + r // GROUP
    head = kv_head * GROUP + r % GROUP
    end = tl.load(CONTEXT + row, mask=inside, other=0) + 1
    last = tl.max(end, 0)
    low = 0
    if WINDOW:
        low = tl.maximum(last - TOKENS - window, 0) // TILE * TILE
    high = last
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(last - low, TILE), SPLITS) * TILE
        low = low + tl.program_id(2) * share
        high = tl.minimum(low + share, last)
    mask = inside[:, None] & (d < D)[None, :]
    q = tl.load(Q + (row * stride_q + head * stride_qh)[:, None] + d[None, :], mask=mask, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    table = TABLE + block * stride_table
    TYPE: tl.constexpr = Q.dtype.element_ty
    # What all tokens of the block see is most of it, and needs no mask.
    seen_by_all = low
    if not WINDOW:
        seen_by_all = tl.maximum(tl.minimum(high, tl.min(tl.where(inside, end, last), 0)) // TILE * TILE, low)
    for start in range(low, seen_by_all, TILE):
        page = tl.load(table + start // PAGE).to(tl.int64)
        held = head_start(page, kv_head, KV_HEADS, PAGE, D, KEPT)
        packed = scales_at(SCALES, page, kv_head, start % PAGE, t, None, KV_HEADS, PAGE, KEPT)
        if D == DP:
            k = keys_at(KP, held, start % PAGE, t, d, None, packed, KV_HEADS, D, KEPT, TYPE)
            v = values_at(VP, held, start % PAGE, t, d, None, packed, KV_HEADS, D, TILE, KEPT, TYPE)
        else:
            k = keys_at(KP, held, start % PAGE, t, d, (d < D)[None, :], packed, KV_HEADS, D, KEPT, TYPE)
            v = values_at(VP, held, start % PAGE, t, d, (d < D)[None, :], packed, KV_HEADS, D, TILE, KEPT, TYPE)
        score = _scores(q, k, scale, EXACT)
        peak, total, acc = _add_tile(score, v, peak, total, acc, EXACT)
    for start in range(seen_by_all, high, TILE):
        page = tl.load(table + start // PAGE).to(tl.int64)
        held = head_start(page, kv_head, KV_HEADS, PAGE, D, KEPT)
        place = start + t
        kv_mask = (place < high)[:, None] & (d < D)[None, :]
        seen = (place < high)[None, :] & (place[None, :] < end[:, None])
        if WINDOW:
            seen = seen & (place[None, :] >= (end - window)[:, None])
        packed = scales_at(SCALES, page, kv_head, start % PAGE, t, place < high, KV_HEADS, PAGE, KEPT)
        k = keys_at(KP, held, start % PAGE, t, d, kv_mask, packed, KV_HEADS, D, KEPT, TYPE)
        v = values_at(VP, held, start % PAGE, t, d, kv_mask, packed, KV_HEADS, D, TILE, KEPT, TYPE)
        # A value that is not finite is one only for the tokens that see it: for the others it would be 0 times it.
        score = tl.where(seen, _scores(q, k, scale, EXACT) + tl.sum((v - v).to(tl.float32), 1)[None, :], float("-inf"))
        v = tl.where(v - v == 0.0, v, 0.0)
        peak, total, acc = _add_tile(score, v, peak, total, acc, EXACT)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    if SPLITS > 1:
        i = (tl.program_id(2) * tl.num_programs(0) * TOKENS + row) * HEADS + head
        tl.store(PART_MAX + i, peak, mask=inside)
        tl.store(PART_SUM + i, total, mask=inside)
        tl.store(PART + i[:, None] * D + d[None, :], acc, mask=mask)
    else:
        out = acc / total[:, None]
        tl.store(OUT + (row * HEADS + head)[:, None] * D + d[None, :], out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _scores(q, k, scale, EXACT: tl.constexpr):
    """As powers of two."""
    if EXACT:
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        score = tl.dot(q, tl.trans(k))
    return score * scale * 1.4426950408889634


@triton.jit
def _add_tile(score, v, peak, total, acc, EXACT: tl.constexpr):
    """The state with one more tile of keys and values."""
    new_peak = tl.maximum(peak, tl.max(score, 1))
    # While a row has seen nothing its peak is -inf: the factors are of zeros.
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2(score - safe[:, None])
    fade = tl.exp2(peak - safe)
    total = total * fade + tl.sum(weight, 1)
    if EXACT:
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    else:
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None])
    return new_peak, total, acc
