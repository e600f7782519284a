# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Attention of one new token for each of few rows, from the product of its projections to what the output projection reads, in one kernel.

One program computes one row, one KV head (its query heads together) and one split of the context. It adds up the parts of the product
and the bias, norms (Qwen3) and rotates its queries and the new key. The split that the new token falls into stores its key and value, and
has them at hand instead of reading them back. The split that ends last of a row and KV head adds up what all of them have left, in the
order of the splits, so that it does not matter which one that is. While the product ends, a program asks for its first keys and values
(early.py): into shared memory where all programs fit on the GPU at once, else into the L2 cache.

`new_heads` makes queries, key and value of the product, `over_pages` and `over_float8_pages` go over a split. In float8 both products are
of float16, which the GPU makes of float8 in one instruction: keys and values lie there as pairs of numbers, of which the first and the
second ones are multiplied apart. A key's scale is a factor of its score, a value's of its weight; the peak is that of weights with their
scales, so that these are at most 1. The new token is rounded before it is attended to.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.generation.gpu.early import begin, early, fetch
from lockstep.generation.gpu.float8 import (
    encode,
    key_scale,
    pack_scales,
    packed_scales,
    power_below,
    scale_of,
    split_pairs,
    value_power,
    value_scale,
)

MOST_PAIRS = 256
"""Rows times KV heads at most. With more, contexts need not be cut, and shared prefixes are read together (attention.py)."""
_PROGRAMS = 200
"""More than one for each multiprocessor of an H100 or H200; with twice as many the splits take longer to join than they save."""
_MOST_SPLITS = 16
_SMALL_PROGRAMS = 500
_SMALL = {"TILE": 64, "num_warps": 2, "num_stages": 7}
"""How float8 pages are read: by smaller programs, and more of them."""
_MOST_LOADING_WARPS = 1024
"""Of programs that load keys and values before they wait, which takes twice the registers: what an H100 or H200 has room for at once."""


def cuts(rows: int, kv_heads: int, kept: str = "auto") -> int:
    """Return the number of splits of each row's context: 2, 4, 8 or 16, or 1 if there are too many rows."""
    pairs = rows * kv_heads
    if pairs > MOST_PAIRS:
        return 1
    programs = _PROGRAMS if kept == "auto" else _SMALL_PROGRAMS
    splits = triton.next_power_of_2(triton.cdiv(programs, pairs))
    return min(_MOST_SPLITS, max(2, splits))


def _stages(rows: int, loads_first: bool) -> int:
    """Tiles of keys and values that a program has in flight. With four, more programs fit on a multiprocessor, which many rows need."""
    return 5 if rows <= 32 or loads_first else 4


class NewToken:
    """For layers with `heads` query heads. `cos` and `sin` [positions, D / 2]."""

    def __init__(self, heads: int, cos: Tensor, sin: Tensor, eps: float) -> None:
        self._heads = heads
        self._cos = cos
        self._sin = sin
        self._eps = eps
        self._arrived = torch.zeros(MOST_PAIRS, dtype=torch.int32, device=cos.device)
        """How many splits of a row and KV head have ended; the last one sets it back."""

    def __call__(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        norms: tuple[Tensor, Tensor] | None,
        k_pages: Tensor,
        v_pages: Tensor,
        positions: Tensor,
        slots: Tensor,
        page_table: Tensor,
        context_lens: Tensor,
        *,
        scale: float,
        window: int | None,
        splits: int,
        scales: Tensor | None = None,
        kept: str = "auto",
    ) -> Tensor:
        """[rows, heads D] of `qkv` [rows, (heads + 2 kv_heads) D], or of parts [parts, rows, ...] that add up, with `bias`, to it.

        Key and value go to `slots` of the pages. No row may read what another one writes. `norms` are the weights of the heads' norms,
        of queries and of keys. The rest is as in `paged_attention`.
        """
        page_size, kv_heads, dim = k_pages.shape[1:]
        rows, width = qkv.shape[-2:]
        heads = self._heads
        assert rows * kv_heads <= MOST_PAIRS, f"{rows} rows of {kv_heads} KV heads are too many"
        out = torch.empty(rows, heads * dim, dtype=self._cos.dtype, device=qkv.device)
        part = sums = out
        if splits > 1:
            part = torch.empty(splits, rows, heads, dim, dtype=torch.float32, device=qkv.device)
            sums = torch.empty(2, splits, rows, heads, dtype=torch.float32, device=qkv.device)
        padded = max(16, triton.next_power_of_2(dim))
        q_norm, k_norm = norms or (out, out)
        tile = max(16, min(page_size, 16384 // (padded * out.element_size())))
        warps = 4 if scales is None else _SMALL["num_warps"]
        loads_first = rows * kv_heads * splits * warps <= _MOST_LOADING_WARPS
        reading = {"TILE": tile, "num_warps": warps, "num_stages": _stages(rows, loads_first)}
        if scales is not None:
            reading = _SMALL | {"TILE": min(_SMALL["TILE"], 2 * page_size)}
        _attend_new[(rows, kv_heads, splits)](
            qkv, out if bias is None else bias, self._cos, self._sin, positions, slots, k_pages, v_pages, packed_scales(scales, out),
            page_table, context_lens,
            q_norm, k_norm, out, part, sums, self._arrived, self._eps, scale, window or 0, page_table.stride(0), rows * width,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, D=dim, DP=padded,
            ROWS=max(16 if scales is None else 8, triton.next_power_of_2(heads // kv_heads)),
            HALF=max(16, triton.next_power_of_2(dim // 2)), PAGE=page_size, SPLITS=splits,
            PARTS=qkv.shape[0] if qkv.dim() == 3 else 0, BIAS=bias is not None, NORM=norms is not None, WINDOW=window is not None,
            PRECISION="ieee" if out.dtype == torch.float32 else "tf32", KEPT=kept, ASM=qkv.is_cuda,
            LOADS_FIRST=loads_first, **reading, **early(qkv),
        )  # fmt: skip
        return out


@triton.jit
def _sum_up(X, BIASES, place, mask, stride_part, PARTS: tl.constexpr, BIAS: tl.constexpr, TYPE: tl.constexpr):
    """What the parts at `place` and the bias add up to, rounded as training rounds it."""
    x = tl.load(X + place, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(X + part * stride_part + place, mask=mask, other=0.0)
    if BIAS:
        x += tl.load(BIASES + place, mask=mask, other=0.0).to(tl.float32)
    return x.to(TYPE)


@triton.jit
def _norm_and_rotate(x1, x2, NORM, cos, sin, d, eps, D: tl.constexpr, NORMED: tl.constexpr):
    """The two halves [n, D / 2] of heads, normed and rotated, each rounded as training rounds it."""
    H2: tl.constexpr = D // 2
    TYPE: tl.constexpr = x1.dtype
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        w1 = tl.load(NORM + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(NORM + H2 + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
        x1 = (x1 * scale * w1).to(TYPE).to(tl.float32)
        x2 = (x2 * scale * w2).to(TYPE).to(tl.float32)
    return (x1 * cos - x2 * sin).to(TYPE), (x2 * cos + x1 * sin).to(TYPE)


@triton.jit
def new_heads(
    new, row, kv_head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, TYPE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The halves of the queries and of the new key, normed and rotated, and the new value, of what the kernel before has left (`new`);
    waits for it."""
    begin(EARLY, LETS_NEXT=True)
    QKV, BIASES, Q_NORM, K_NORM, cos, sin, eps, stride_part = new
    HEADS: tl.constexpr = KV_HEADS * GROUP
    H2: tl.constexpr = D // 2
    g = tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    whole = tl.arange(0, DP)
    in_half = (d < H2)[None, :]
    QKV += row * ((HEADS + 2 * KV_HEADS) * D)
    q_place = (kv_head * GROUP + g)[:, None] * D + d[None, :]
    q_mask = (g < GROUP)[:, None] & in_half
    q1 = _sum_up(QKV, BIASES, q_place, q_mask, stride_part, PARTS, BIAS, TYPE)
    q2 = _sum_up(QKV, BIASES, q_place + H2, q_mask, stride_part, PARTS, BIAS, TYPE)
    # Every split reads the new key and value, which costs nothing beside its queries; waiting for them after these would.
    k_place = (HEADS + kv_head) * D + d[None, :]
    k1 = _sum_up(QKV, BIASES, k_place, in_half, stride_part, PARTS, BIAS, TYPE)
    k2 = _sum_up(QKV, BIASES, k_place + H2, in_half, stride_part, PARTS, BIAS, TYPE)
    v_place = (HEADS + KV_HEADS + kv_head) * D + whole
    v = _sum_up(QKV, BIASES, v_place, whole < D, stride_part, PARTS, BIAS, TYPE)
    q1, q2 = _norm_and_rotate(q1, q2, Q_NORM, cos, sin, d, eps, D, NORM)
    k1, k2 = _norm_and_rotate(k1, k2, K_NORM, cos, sin, d, eps, D, NORM)
    return q1, q2, k1, k2, v


@triton.jit
def score_of(q1, q2, k1, k2):
    return tl.sum(q1.to(tl.float32) * k1.to(tl.float32) + q2.to(tl.float32) * k2.to(tl.float32), 1)


@triton.jit
def _store_new(
    heads, KP, VP, slot, kv_head, scale, is_last, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr
):
    """The split that the new token falls into stores its key and value. Returns its score, the first peak and the value as numbers."""
    q1, q2, k1, k2, v = heads
    H2: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    whole = tl.arange(0, DP)
    mask = (d < H2)[None, :] & is_last
    target = slot * (KV_HEADS * D) + kv_head * D
    tl.store(KP + target + d[None, :], k1, mask=mask)
    tl.store(KP + target + H2 + d[None, :], k2, mask=mask)
    tl.store(VP + target + whole, v, mask=(whole < D) & is_last)
    score = score_of(q1, q2, k1, k2) * scale
    # The new token is among those that the peak is of, so that weights are rounded as in training; its own is added at the end.
    return score, tl.where(is_last, score, float("-inf")), v


@triton.jit
def over_pages(
    new, cut, KP, VP, TABLE,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, WINDOW: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr, LOADS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Peak, total and weighted values [ROWS, DP] of the tokens of a split, the new one among them where it falls into it. LOADS_FIRST: the
    kernel waits for the one before it in the first turn of its loop, whose first loads the compiler puts before that."""
    row, kv_head, slot, is_last, first, low, stop, high, end, scale = cut
    H2: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    whole = tl.arange(0, DP)
    t = tl.arange(0, TILE)
    in_half = (d < H2)[None, :]
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    k_offsets = t[:, None] * (KV_HEADS * D) + d[None, :]
    v_offsets = t[:, None] * (KV_HEADS * D) + whole[None, :]
    if LOADS_FIRST:
        new_score, peak, new_v = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([DP], TYPE)
        q1, q2 = tl.zeros([ROWS, HALF], TYPE), tl.zeros([ROWS, HALF], TYPE)
    else:
        heads = new_heads(new, row, kv_head, KV_HEADS, GROUP, ROWS, D, DP, HALF, PARTS, BIAS, NORM, TYPE, EARLY)
        new_score, peak, new_v = _store_new(heads, KP, VP, slot, kv_head, scale, is_last, KV_HEADS, D, DP, HALF)
        q1, q2 = heads[0], heads[1]
    for start in range(low, stop, TILE):
        page = tl.load(TABLE + (tl.minimum(start, end) if LOADS_FIRST else start) // PAGE).to(tl.int64)
        base = (page * PAGE + start % PAGE) * (KV_HEADS * D) + kv_head * D
        place = start + t
        seen = place < high
        if WINDOW:
            seen = seen & (place >= first)
        k1 = tl.load(KP + base + k_offsets, mask=seen[:, None] & in_half, other=0.0)
        k2 = tl.load(KP + base + H2 + k_offsets, mask=seen[:, None] & in_half, other=0.0)
        if LOADS_FIRST:  # noqa: SIM102 (known when it is compiled; the other is not)
            if start == low:
                heads = new_heads(new, row, kv_head, KV_HEADS, GROUP, ROWS, D, DP, HALF, PARTS, BIAS, NORM, TYPE, EARLY)
                new_score, peak, new_v = _store_new(heads, KP, VP, slot, kv_head, scale, is_last, KV_HEADS, D, DP, HALF)
                q1, q2 = heads[0], heads[1]
        score = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        score = tl.dot(q2, tl.trans(k2), score, input_precision=PRECISION)
        score = tl.where(seen[None, :], score * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - safe[:, None])
        fade = tl.exp2(peak - safe)
        total = total * fade + tl.sum(weight, 1)
        v = tl.load(VP + base + v_offsets, mask=seen[:, None] & (whole < D)[None, :], other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        peak = new_peak
    new_weight = tl.where(is_last, tl.exp2(new_score - peak), 0.0)
    new_share = new_weight.to(TYPE).to(tl.float32)
    return peak, total + new_weight, acc + new_share[:, None] * new_v.to(tl.float32)[None, :]


@triton.jit
def _store_new_float8(
    heads, KP, VP, SCALES, slot, kv_head, scale, is_last,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The split that the new token falls into stores its key and value. Returns its score, the first peak, the value's codes and their
    scale; queries [D, ROWS] as float16, which has room for bfloat16's bits where their largest number is about 1, and the scale that scores
    then have."""
    q1, q2, k1, k2, v = heads
    H2: tl.constexpr = D // 2
    d = tl.arange(0, HALF)
    whole = tl.arange(0, DP)
    mask = (d < H2)[None, :] & is_last
    k1, k2, v = k1.to(tl.float32), k2.to(tl.float32), v.to(tl.float32)
    k_scale, k_inverse = scale_of(tl.join(k1, k2).reshape([2 * HALF]), 0)
    v_scale, v_inverse = scale_of(v, 0)
    code1, code2, code_v = encode(k1 * k_inverse), encode(k2 * k_inverse), encode(v * v_inverse)
    target = slot // PAGE * (PAGE * KV_HEADS * D) + slot % PAGE * D + kv_head * (PAGE * D)
    tl.store(KP + target + d[None, :], code1, mask=mask)
    tl.store(KP + target + H2 + d[None, :], code2, mask=mask)
    tl.store(VP + target + whole, code_v, mask=(whole < D) & is_last)
    packed = pack_scales(k_scale, v_scale)
    tl.store(SCALES + slot // PAGE * (PAGE * KV_HEADS) + kv_head * PAGE + slot % PAGE + tl.arange(0, 1), packed, mask=is_last)
    score = score_of(q1, q2, code1.to(tl.float32) * k_scale, code2.to(tl.float32) * k_scale) * scale
    peak = tl.where(is_last, score + value_power(packed), float("-inf"))
    q = tl.join(q1, q2).permute(0, 2, 1).reshape([ROWS, D]).to(tl.float32)
    power, inverse = power_below(tl.maximum(tl.max(tl.max(tl.abs(q), 1), 0), 2.0**-60))
    return score, peak, code_v, v_scale, tl.trans((q * inverse).to(tl.float16)), power * scale


@triton.jit
def over_float8_pages(
    new, cut, KP, VP, SCALES, TABLE,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, WINDOW: tl.constexpr,
    TYPE: tl.constexpr, ASM: tl.constexpr, LOADS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `over_pages`. Tokens are the rows of all products, so that few heads fill the matrix unit. Where a page ends and
    another token's numbers begin, only scales are masked: all numbers are finite."""
    row, kv_head, slot, is_last, first, low, stop, high, end, scale = cut
    t = tl.arange(0, TILE)
    tl.static_assert(D == 2 * HALF, "the numbers of a head are taken in pairs")
    PAIRS: tl.constexpr = D // 2
    values = VP.to(tl.pointer_type(tl.int16), bitcast=True)
    in_page = t if TILE <= PAGE else t % PAGE
    k_offsets = in_page[:, None] * D + tl.arange(0, D)[None, :]
    v_offsets = in_page[None, :] * PAIRS + tl.arange(0, PAIRS)[:, None]
    totals = tl.zeros([TILE, ROWS], tl.float32)
    acc_first = tl.zeros([PAIRS, ROWS], tl.float32)
    acc_second = tl.zeros([PAIRS, ROWS], tl.float32)
    if LOADS_FIRST:
        new_score, peak = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        new_v, v_scale = tl.zeros([DP], tl.float32).to(KP.dtype.element_ty), tl.zeros([1], tl.float32)
        q, q_scale = tl.zeros([D, ROWS], tl.float16), scale
    else:
        heads = new_heads(new, row, kv_head, KV_HEADS, GROUP, ROWS, D, DP, HALF, PARTS, BIAS, NORM, TYPE, EARLY)
        new_score, peak, new_v, v_scale, q, q_scale = _store_new_float8(
            heads, KP, VP, SCALES, slot, kv_head, scale, is_last, KV_HEADS, ROWS, D, DP, HALF, PAGE
        )
    for start in range(low, stop, TILE):
        place = start + t
        seen = place < high
        if WINDOW:
            seen = seen & (place >= first)
        page = tl.load(TABLE + (tl.minimum(start, end) if LOADS_FIRST else start) // PAGE).to(tl.int64)
        if TILE <= PAGE:
            held = page * KV_HEADS + kv_head
            packed = tl.load(SCALES + held * PAGE + start % PAGE + t, mask=seen, other=0)
            k = tl.load(KP + held * (PAGE * D) + start % PAGE * D + k_offsets)
            v_pairs = tl.load(values + held * (PAGE * PAIRS) + start % PAGE * PAIRS + v_offsets)
        else:
            tl.static_assert(TILE == 2 * PAGE)
            next_page = tl.load(TABLE + tl.minimum(start + PAGE, end) // PAGE).to(tl.int64)
            held = tl.where(t < PAGE, page, next_page) * KV_HEADS + kv_head
            packed = tl.load(SCALES + held * PAGE + in_page, mask=seen, other=0)
            k = tl.load(KP + (held * (PAGE * D))[:, None] + k_offsets)
            v_pairs = tl.load(values + (held * (PAGE * PAIRS))[None, :] + v_offsets)
        if LOADS_FIRST:  # noqa: SIM102 (known when it is compiled; the other is not)
            if start == low:
                heads = new_heads(new, row, kv_head, KV_HEADS, GROUP, ROWS, D, DP, HALF, PARTS, BIAS, NORM, TYPE, EARLY)
                new_score, peak, new_v, v_scale, q, q_scale = _store_new_float8(
                    heads, KP, VP, SCALES, slot, kv_head, scale, is_last, KV_HEADS, ROWS, D, DP, HALF, PAGE
                )
        score = tl.dot(k.to(tl.float16), q)
        score = tl.where(seen[:, None], score * (key_scale(packed) * q_scale)[:, None], float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score + value_power(packed)[:, None], 0))
        # A tile wholly before the window leaves the peak at -inf: then nothing has been seen and the factors are of zeros.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - safe[None, :])
        fade = tl.exp2(peak - safe)[None, :]
        totals = totals * fade + weight
        weight = (weight * value_scale(packed)[:, None]).to(tl.float16)
        v_first, v_second = split_pairs(v_pairs, ASM)
        acc_first = tl.dot(v_first, weight, acc_first * fade)
        acc_second = tl.dot(v_second, weight, acc_second * fade)
        peak = new_peak
    total, acc = tl.sum(totals, 0), tl.join(acc_first, acc_second).permute(1, 0, 2).reshape([ROWS, D])
    new_weight = tl.where(is_last, tl.exp2(new_score - peak), 0.0)
    new_share = (new_weight * v_scale).to(tl.float16).to(tl.float32)
    return peak, total + new_weight, acc + new_share[:, None] * new_v.to(tl.float32)[None, :]


@triton.jit
def _attend_new(
    QKV, BIASES, COS, SIN, POSITION, SLOT, KP, VP, SCALES, TABLE, CONTEXT, Q_NORM, K_NORM, OUT, PART, SUMS, ARRIVED, eps, scale, window,
    stride_table, stride_part,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, KEPT: tl.constexpr, ASM: tl.constexpr, LOADS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    H2: tl.constexpr = D // 2
    TYPE: tl.constexpr = OUT.dtype.element_ty
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    end = tl.load(CONTEXT + row)
    first = 0
    if WINDOW:
        first = tl.maximum(end + 1 - window, 0)
    low, high, is_last = first // TILE * TILE, end, split == 0
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end + 1 - low, TILE), SPLITS) * TILE
        is_last = (end - low) // share == split
        low = low + split * share
        high = tl.minimum(low + share, end)

    g = tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    whole = tl.arange(0, DP)
    t = tl.arange(0, TILE)
    position = tl.load(POSITION + row)
    cos = tl.load(COS + position * H2 + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(SIN + position * H2 + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
    slot = tl.load(SLOT + row)
    TABLE += row * stride_table
    if EARLY and not LOADS_FIRST:
        # The first tile of keys and values, in lines of 128 bytes; no kernel of this step writes them.
        LINE: tl.constexpr = 1024 // KP.dtype.element_ty.primitive_bitwidth
        TOKEN: tl.constexpr = KV_HEADS * D if KEPT == "auto" else D
        HEAD: tl.constexpr = D if KEPT == "auto" else PAGE * D
        token = tl.maximum(tl.minimum(low + t, high - 1), 0)
        pages = tl.load(TABLE + token // PAGE).to(tl.int64)
        line = tl.minimum(tl.arange(0, max(1, DP // LINE)) * LINE, D - 1)
        at = pages * (PAGE * KV_HEADS * D) + token % PAGE * TOKEN + kv_head * HEAD
        fetch(KP + at[:, None] + line[None, :])
        fetch(VP + at[:, None] + line[None, :])
    new = (QKV, BIASES, Q_NORM, K_NORM, cos, sin, eps, stride_part)
    # A split without a token takes one turn too where it waits in it, and sees none.
    stop = tl.maximum(high, low + 1) if LOADS_FIRST else high
    cut = (row, kv_head, slot, is_last, first, low, stop, high, end, scale * LOG2_E)
    if KEPT == "fp8":
        peak, total, acc = over_float8_pages(
            new, cut, KP, VP, SCALES, TABLE, KV_HEADS, GROUP, ROWS, D, DP, HALF, PAGE, TILE, PARTS, BIAS, NORM, WINDOW, TYPE, ASM,
            LOADS_FIRST, EARLY,
        )  # fmt: skip
    else:
        peak, total, acc = over_pages(
            new, cut, KP, VP, TABLE, KV_HEADS, GROUP, ROWS, D, DP, HALF, PAGE, TILE, PARTS, BIAS, NORM, WINDOW, TYPE, PRECISION,
            LOADS_FIRST, EARLY,
        )  # fmt: skip
    i = row * HEADS + (kv_head * GROUP + g)
    mask = (g < GROUP)[:, None] & (whole < D)[None, :]
    if SPLITS > 1:
        stride = tl.num_programs(0) * HEADS
        at = split * stride + i
        tl.store(SUMS + at, peak, mask=g < GROUP)
        tl.store(SUMS + SPLITS * stride + at, total, mask=g < GROUP)
        tl.store(PART + at[:, None] * D + whole[None, :], acc, mask=mask)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        counter = ARRIVED + row * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            _join(SUMS, PART, OUT, i, whole, g < GROUP, mask, stride, D, ROWS, DP, SPLITS)
            tl.store(counter, 0)
    else:
        tl.store(OUT + i[:, None] * D + whole[None, :], (acc / total[:, None]).to(TYPE), mask=mask)


@triton.jit
def _join(
    SUMS, PART, OUT, i, d, in_group, mask, stride, D: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Add up what the splits have left of the heads i. Read past the first cache, which may hold what was there before."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for s in tl.static_range(SPLITS):
        peak = tl.maximum(peak, tl.load(SUMS + s * stride + i, mask=in_group, other=0.0, cache_modifier=".cg"))
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for s in tl.static_range(SPLITS):
        weight = tl.exp2(tl.load(SUMS + s * stride + i, mask=in_group, other=0.0, cache_modifier=".cg") - peak)
        total += weight * tl.load(SUMS + (SPLITS + s) * stride + i, mask=in_group, other=1.0, cache_modifier=".cg")
        part = tl.load(PART + (s * stride + i)[:, None] * D + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        acc += weight[:, None] * part
    tl.store(OUT + i[:, None] * D + d[None, :], (acc / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
