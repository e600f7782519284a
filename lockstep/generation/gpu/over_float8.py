# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""A new token's attention over one split of the float8 pages of its sequence (new_token.py, float8.py).

Both products are of float16, which the GPU makes of float8 in one instruction: keys and values lie there as pairs of numbers, of which the
first and the second ones are multiplied apart. A key's scale is a factor of its score, a value's of its weight; the peak is that of weights
with their scales, so that these are at most 1. The new token is rounded before it is attended to.
"""

import triton
import triton.language as tl

from lockstep.generation.gpu.float8 import (
    encode,
    key_scale,
    pack_scales,
    power_below,
    scale_of,
    split_pairs,
    value_power,
    value_scale,
)
from lockstep.generation.gpu.new_heads import new_heads, score_of


@triton.jit
def _store_new(
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
        new_score, peak, new_v, v_scale, q, q_scale = _store_new(
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
                new_score, peak, new_v, v_scale, q, q_scale = _store_new(
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
