# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Attention of one new token per sequence over its pages (Triton).

The layout is that of `generation/pages.py`: `k_pages`, `v_pages` [pages, page_size, kv_heads, D], `page_table` [rows, width] int32,
`context_lens` [rows] int32 tokens in the cache before this step. The new token's key and value are stored first (`store_kv`), so a row
attends to context + 1 tokens. Pages of fewer bits come with `scales` (tiles.py), and are made numbers of
the queries' type.

One program computes one row, one KV head (its G query heads together, padded to 16 or more for the matrix unit) and one split of the
context. Where rows x heads are too few to fill the chip, the context is cut into splits; each leaves its maximum, sum and weighted values,
and `_join_splits` adds them up. The number of splits depends on the number of rows alone, so rounding does not depend on the contexts;
only in a stream, long contexts are cut into more.

In large batches the pages that samples of one prompt share are read once for all of them (`SharedPrefixes`): `_attend_prefix` takes the
queries of a group of neighbouring rows together and leaves its state, from which `_attend` goes on with each row's own pages.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.generation.gpu.float8 import packed_scales
from lockstep.generation.gpu.tiles import head_start, keys_at, scales_at, values_at

_PROGRAMS = 512
"""About four programs for each multiprocessor of an H100 or H200: fewer leave memory bandwidth unused (measured, docs/generation.md)."""
_LONG_PROGRAMS = 2048
"""The same where contexts are long: they differ in length, and the kernel takes as long as its longest program."""
_MOST_SPLITS = 16
_MOST_LONG_SPLITS = 8
_GROUP_ROWS = 64


@dataclass(frozen=True)
class SharedPrefixes:
    """Groups of neighbouring rows whose first pages are the same. Group g is rows first[g]..first[g] + size[g]; 0 is no group."""

    first: Tensor
    """[groups] int32"""
    size: Tensor
    """[groups] int32, at most `group_limit`"""
    tokens: Tensor
    """[rows] int32: how many tokens, in whole pages, the row's group shares; 0 outside groups."""


def group_limit(heads: int, kv_heads: int) -> int:
    """How many rows a group of SharedPrefixes can have: their queries of one KV head fill the matrix unit's 64 rows."""
    return max(1, _GROUP_ROWS * kv_heads // heads)


def num_splits(rows: int, num_kv_heads: int, long: bool = False) -> int:
    """Into how many parts each context is cut when `rows` sequences are decoded together: 1, 2, 4, 8 or 16; more where they are `long`."""
    wanted = max(1, min(_MOST_SPLITS, _PROGRAMS // (rows * num_kv_heads)))
    if long:
        wanted = max(wanted, min(_MOST_LONG_SPLITS, _LONG_PROGRAMS // (rows * num_kv_heads)))
    return 1 << (wanted.bit_length() - 1)


def paged_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shared: SharedPrefixes | None = None,
    splits: int | None = None,
    scales: Tensor | None = None,
    kept: str = "auto",
) -> Tensor:
    """[rows, H, D]: softmax(scale q.k) v over tokens 0..context of each row, the new one included.

    `query` [rows, H, D] with D contiguous. `window` keeps the last so many tokens; `softcap` c replaces a score s by c tanh(s / c).
    `sinks` [H] are scores that take part in the softmax and carry no value. `shared` is used
    where there is neither window nor sinks nor more than one split. `splits` overrides `num_splits` (tests).
    """
    rows, heads, dim = query.shape
    page_size = k_pages.shape[1]
    kv_heads = k_pages.shape[2]
    assert heads % kv_heads == 0, f"{heads} query heads do not group over {kv_heads} key-value heads"
    assert query.stride(2) == 1, "a head's numbers must lie together"
    group = heads // kv_heads
    splits = num_splits(rows, kv_heads) if splits is None else splits
    out = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    padded = max(16, triton.next_power_of_2(dim))
    # A tile of keys of about 16 KiB: three stages of keys and values stay well inside shared memory.
    tile = max(16, min(page_size, 16384 // (padded * query.element_size())))
    if splits > 1 or window is not None or sinks is not None:
        shared = None
    part = part_max = part_sum = out
    if splits > 1 or shared is not None:
        part = torch.empty(splits, rows, heads, dim, dtype=torch.float32, device=query.device)
        part_max, part_sum = torch.empty(2, splits, rows, heads, dtype=torch.float32, device=query.device)
    inputs = (query, k_pages, v_pages, packed_scales(scales, query), page_table)
    numbers = (query.stride(0), query.stride(1), page_table.stride(0), scale, softcap or 1.0)
    options = {
        "KV_HEADS": kv_heads, "GROUP": group, "D": dim, "DP": padded, "PAGE": page_size, "TILE": tile,
        "SOFTCAP": softcap is not None, "EXACT": query.dtype == torch.float32, "KEPT": kept,
        "num_warps": 4,
    }  # fmt: skip
    if shared is not None:
        _attend_prefix[(len(shared.first), kv_heads)](
            *inputs, shared.first, shared.size, shared.tokens, part, part_max, part_sum, *numbers,
            ROWS=_GROUP_ROWS if group <= _GROUP_ROWS else triton.next_power_of_2(group), num_stages=2, **options,
        )  # fmt: skip
    _attend[(rows, kv_heads, splits)](
        *inputs, context_lens, query if sinks is None else sinks, context_lens if shared is None else shared.tokens,
        out, part, part_max, part_sum, *numbers, window or 0,
        ROWS=max(16, triton.next_power_of_2(group)), SPLITS=splits, WINDOW=window is not None, SINKS=sinks is not None,
        SHARED=shared is not None, num_stages=2 if rows <= 256 else 3, **options,
    )  # fmt: skip
    if splits > 1:
        join_splits(part, part_max, part_sum, out)
    return out


def join_splits(part: Tensor, part_max: Tensor, part_sum: Tensor, out: Tensor) -> None:
    """Add up what splits have left: weighted values [splits, rows, H, D], maxima and sums [splits, rows, H], into `out` [rows, H, D]."""
    splits, rows, heads, dim = part.shape
    padded = max(16, triton.next_power_of_2(dim))
    _join_splits[(rows, heads)](part, part_max, part_sum, out, rows, HEADS=heads, D=dim, DP=padded, SPLITS=splits, num_warps=1)


def store_kv(key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write `key`, `value` [N, kv_heads, D] (D contiguous) to `slots` [N] int64 of the pages."""
    tokens, heads, dim = key.shape
    assert key.stride(2) == value.stride(2) == 1, "a head's numbers must lie together"
    _store_kv[(tokens,)](
        key, value, k_pages, v_pages, slots, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        D=dim, HEADS=heads, BLOCK=triton.next_power_of_2(heads * dim), num_warps=2,
    )  # fmt: skip


def decode_slots(page_table: Tensor, context_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Position and slot [rows] int64 of each row's new token."""
    rows = len(context_lens)
    out = torch.empty(2, rows, dtype=torch.int64, device=context_lens.device)
    _decode_slots[(triton.cdiv(rows, 256),)](page_table, context_lens, out, rows, page_table.stride(0), PAGE=page_size, BLOCK=256)
    return out[0], out[1]


@triton.jit
def _decode_slots(TABLE, CONTEXT, OUT, rows, stride_table, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    position = tl.load(CONTEXT + row, mask=inside, other=0).to(tl.int64)
    page = tl.load(TABLE + row * stride_table + position // PAGE, mask=inside, other=0).to(tl.int64)
    tl.store(OUT + row, position, mask=inside)
    tl.store(OUT + rows + row, page * PAGE + position % PAGE, mask=inside)


def copy_pages(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy pages `sources` [n] to `targets` [n] in every layer of `pool` [layers, 2, pages, page_size, kv_heads, D]."""
    parts = pool.shape[0] * pool.shape[1]
    size = pool[0, 0, 0].numel()
    block = 4096
    _copy_pages[(len(sources), parts, triton.cdiv(size, block))](
        pool, sources, targets, pool.stride(1), SIZE=size, BLOCK=block, num_warps=4
    )


@triton.jit
def _copy_pages(POOL, SOURCE, TARGET, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    base = POOL + tl.program_id(1).to(tl.int64) * stride
    source = tl.load(SOURCE + tl.program_id(0)).to(tl.int64)
    target = tl.load(TARGET + tl.program_id(0)).to(tl.int64)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    tl.store(base + target * SIZE + i, tl.load(base + source * SIZE + i, mask=i < SIZE), mask=i < SIZE)


@triton.jit
def _store_kv(
    K, V, KP, VP, SLOT, stride_k, stride_kh, stride_v, stride_vh, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOT + token)
    i = tl.arange(0, BLOCK)
    inside = i < HEADS * D
    k = tl.load(K + token * stride_k + (i // D) * stride_kh + i % D, mask=inside)
    v = tl.load(V + token * stride_v + (i // D) * stride_vh + i % D, mask=inside)
    tl.store(KP + slot * (HEADS * D) + i, k, mask=inside)
    tl.store(VP + slot * (HEADS * D) + i, v, mask=inside)


@triton.jit
def _attend(
    Q, KP, VP, SCALES, TABLE, CONTEXT, SINK, SHARED_TOKENS, OUT, PART, PART_MAX, PART_SUM, stride_q, stride_qh, stride_table, scale,
    softcap, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    SHARED: tl.constexpr, EXACT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    end = tl.load(CONTEXT + row) + 1
    first = 0
    if WINDOW:
        first = tl.maximum(end - window, 0)
    low = first // TILE * TILE
    high = end
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - low, TILE), SPLITS) * TILE
        low = low + tl.program_id(2) * share
        high = tl.minimum(low + share, end)

    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    t = tl.arange(0, TILE)
    head = kv_head * GROUP + g
    q_mask = (g < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(Q + row * stride_q + head[:, None] * stride_qh + d[None, :], mask=q_mask, other=0.0)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    if SINKS:
        sink = tl.load(SINK + head, mask=g < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
        counts = tl.program_id(2) == 0  # one of the splits counts them
        peak = tl.where(counts, sink, peak)
        total = tl.where(counts, 1.0, total)
    if SHARED:
        begun = tl.load(SHARED_TOKENS + row)
        i = row * HEADS + head
        goes_on = (g < GROUP) & (begun > 0)
        peak = tl.load(PART_MAX + i, mask=goes_on, other=float("-inf"))
        total = tl.load(PART_SUM + i, mask=goes_on, other=0.0)
        acc = tl.load(PART + i[:, None] * D + d[None, :], mask=q_mask & (begun > 0), other=0.0)
        low = begun
    TYPE: tl.constexpr = Q.dtype.element_ty
    for start in range(low, high, TILE):
        page = tl.load(TABLE + row * stride_table + start // PAGE).to(tl.int64)
        held = head_start(page, kv_head, KV_HEADS, PAGE, D, KEPT)
        place = start + t
        seen = place < high
        if WINDOW:
            seen = seen & (place >= first)
        kv_mask = seen[:, None] & (d < D)[None, :]
        packed = scales_at(SCALES, page, kv_head, start % PAGE, t, seen, KV_HEADS, PAGE, KEPT)
        k = keys_at(KP, held, start % PAGE, t, d, kv_mask, packed, KV_HEADS, D, KEPT, TYPE)
        if EXACT:
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            score = tl.dot(q, tl.trans(k)) * scale
        if SOFTCAP:
            score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
        score = tl.where(seen[None, :], score * 1.4426950408889634, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        # A tile wholly before the window leaves the peak at -inf: then nothing has been seen and the factors are of zeros.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - safe[:, None])
        fade = tl.exp2(peak - safe)
        total = total * fade + tl.sum(weight, 1)
        v = values_at(VP, held, start % PAGE, t, d, kv_mask, packed, KV_HEADS, D, TILE, KEPT, TYPE)
        if EXACT:
            acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None])
        peak = new_peak
    if SPLITS > 1:
        i = (tl.program_id(2) * tl.num_programs(0) + row) * HEADS + head
        tl.store(PART_MAX + i, peak, mask=g < GROUP)
        tl.store(PART_SUM + i, total, mask=g < GROUP)
        tl.store(PART + i[:, None] * D + d[None, :], acc, mask=q_mask)
    else:
        out = acc / total[:, None]
        tl.store(OUT + (row * HEADS + head)[:, None] * D + d[None, :], out.to(OUT.dtype.element_ty), mask=q_mask)


@triton.jit
def _join_splits(
    PART, PART_MAX, PART_SUM, OUT, rows, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, DP)
    i = (s * rows + row) * HEADS + head
    part_max = tl.load(PART_MAX + i)
    weight = tl.exp2(part_max - tl.max(part_max, 0))
    total = tl.sum(weight * tl.load(PART_SUM + i), 0)
    part = tl.load(PART + i[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    out = tl.sum(part * weight[:, None], 0) / total
    tl.store(OUT + (row * HEADS + head) * D + d, out.to(OUT.dtype.element_ty), mask=d < D)


@triton.jit
def _attend_prefix(
    Q, KP, VP, SCALES, TABLE, FIRST, SIZE, SHARED_TOKENS, PART, PART_MAX, PART_SUM, stride_q, stride_qh, stride_table, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """One program: the queries of one group and one KV head over the pages that the group shares."""
    size = tl.load(SIZE + tl.program_id(0))
    if size == 0:
        return
    first = tl.load(FIRST + tl.program_id(0)).to(tl.int64)
    kv_head = tl.program_id(1)
    end = tl.load(SHARED_TOKENS + first)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    r = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    t = tl.arange(0, TILE)
    row = first + r // GROUP
    head = kv_head * GROUP + r % GROUP
    inside = r < size * GROUP
    mask = inside[:, None] & (d < D)[None, :]
    q = tl.load(Q + (row * stride_q + head * stride_qh)[:, None] + d[None, :], mask=mask, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    TYPE: tl.constexpr = Q.dtype.element_ty
    kv_mask = (t >= 0)[:, None] & (d < D)[None, :]
    for start in range(0, end, TILE):
        page = tl.load(TABLE + first * stride_table + start // PAGE).to(tl.int64)
        held = head_start(page, kv_head, KV_HEADS, PAGE, D, KEPT)
        packed = scales_at(SCALES, page, kv_head, start % PAGE, t, None, KV_HEADS, PAGE, KEPT)
        k = keys_at(KP, held, start % PAGE, t, d, kv_mask, packed, KV_HEADS, D, KEPT, TYPE)
        if EXACT:
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            score = tl.dot(q, tl.trans(k)) * scale
        if SOFTCAP:
            score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
        score = score * 1.4426950408889634
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weight, 1)
        v = values_at(VP, held, start % PAGE, t, d, kv_mask, packed, KV_HEADS, D, TILE, KEPT, TYPE)
        if EXACT:
            acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None])
        peak = new_peak
    i = row * HEADS + head
    tl.store(PART_MAX + i, peak, mask=inside)
    tl.store(PART_SUM + i, total, mask=inside)
    tl.store(PART + i[:, None] * D + d[None, :], acc, mask=mask)
