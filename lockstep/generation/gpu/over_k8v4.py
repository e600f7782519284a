# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""A new token's attention over one split of pages with keys in eight bits and values in four (new_token.py, k8v4.py).

As in over_float8.py; codes go to the matrix unit as they are. Keys are 128 too large, so a score is less by 128 times the sum of its query.
Of four values in 16 bits each is multiplied apart; their zeros are summed up with the weights, and taken away at the end.
"""

import triton
import triton.language as tl

from lockstep.generation.gpu.float8 import key_scale, power_below
from lockstep.generation.gpu.k8v4 import (
    UNIT,
    bytes_as_half,
    in_order,
    key_codes,
    key_half,
    key_scale_of,
    pack_codes,
    split_quads,
    value_codes,
    value_half,
    value_power,
    value_scale,
    value_scale_of,
    value_zero,
)
from lockstep.generation.gpu.new_heads import new_heads, score_of


@triton.jit
def _store_new(
    heads, KP, VP, SCALES, slot, kv_head, scale, is_last,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The split that the new token falls into stores its key and value. Returns its score, the first peak, the value over its scale, and
    that scale; queries [D, ROWS] as float16, which has room for bfloat16's bits where their largest number is about 1, by how much scores
    are too large then, and their scale."""
    q1, q2, k1, k2, v = heads
    H2: tl.constexpr = D // 2
    QUADS: tl.constexpr = D // 4
    d = tl.arange(0, HALF)
    mask = (d < H2)[None, :] & is_last
    k1, k2, v = k1.to(tl.float32), k2.to(tl.float32), tl.reshape(v.to(tl.float32), [1, DP])
    k_scale, k_inverse = key_scale_of(k1, k2, 1)
    v_scale, v_zero, v_inverse = value_scale_of(v, 1)
    code1, code2, code_v = key_codes(k1, k_inverse), key_codes(k2, k_inverse), value_codes(v, v_inverse, v_zero)
    head = slot // PAGE * KV_HEADS + kv_head
    target = head * (PAGE * D * 3 // 2) + slot % PAGE * D
    tl.store(KP + target + d[None, :], code1, mask=mask)
    tl.store(KP + target + H2 + d[None, :], code2, mask=mask)
    quads = VP.to(tl.pointer_type(tl.int16), bitcast=True) + head * (PAGE * D * 3 // 4) + slot % PAGE * QUADS
    tl.store(quads + tl.arange(0, QUADS)[None, :], pack_codes(code_v, 1, QUADS), mask=is_last)
    packed = tl.reshape((value_half(v_scale, v_zero) << 16) | key_half(k_scale), [1])
    tl.store(SCALES + head * PAGE + slot % PAGE + tl.arange(0, 1), packed, mask=is_last)
    score = score_of(q1, q2, (code1.to(tl.float32) - 128.0) * k_scale, (code2.to(tl.float32) - 128.0) * k_scale) * scale
    peak = tl.where(is_last, score + value_power(packed), float("-inf"))
    q = tl.join(q1, q2).permute(0, 2, 1).reshape([ROWS, D]).to(tl.float32)
    power, inverse = power_below(tl.maximum(tl.max(tl.max(tl.abs(q), 1), 0), 2.0**-60))
    v = tl.reshape(code_v - v_zero, [DP])
    q = (q * inverse).to(tl.float16)
    return score, peak, v, value_scale(packed), tl.trans(q), 128.0 * tl.sum(q.to(tl.float32), 1), power * scale


@triton.jit
def over_k8v4_pages(
    new, cut, KP, VP, SCALES, TABLE,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, WINDOW: tl.constexpr,
    TYPE: tl.constexpr, ASM: tl.constexpr, LOADS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `over_float8_pages`."""
    row, kv_head, slot, is_last, first, low, stop, high, end, scale = cut
    t = tl.arange(0, TILE)
    tl.static_assert(D == 2 * HALF and D == DP, "a head's numbers are taken in pairs and fours")
    QUADS: tl.constexpr = D // 4
    HEAD: tl.constexpr = PAGE * D * 3 // 2
    values = VP.to(tl.pointer_type(tl.int16), bitcast=True)
    in_page = t if TILE <= PAGE else t % PAGE
    k_offsets = in_page[:, None] * D + tl.arange(0, D)[None, :]
    v_offsets = in_page[None, :] * QUADS + tl.arange(0, QUADS)[:, None]
    totals = tl.zeros([TILE, ROWS], tl.float32)
    zeros = tl.zeros([TILE, ROWS], tl.float32)
    acc1 = tl.zeros([QUADS, ROWS], tl.float32)
    acc2 = tl.zeros([QUADS, ROWS], tl.float32)
    acc3 = tl.zeros([QUADS, ROWS], tl.float32)
    acc4 = tl.zeros([QUADS, ROWS], tl.float32)
    if LOADS_FIRST:
        new_score, peak = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        new_v, v_scale = tl.zeros([DP], tl.float32), tl.zeros([1], tl.float32)
        q, too_large, q_scale = tl.zeros([D, ROWS], tl.float16), tl.zeros([ROWS], tl.float32), scale
    else:
        heads = new_heads(new, row, kv_head, KV_HEADS, GROUP, ROWS, D, DP, HALF, PARTS, BIAS, NORM, TYPE, EARLY)
        new_score, peak, new_v, v_scale, q, too_large, q_scale = _store_new(
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
            k = tl.load(KP + held * HEAD + start % PAGE * D + k_offsets)
            v_quads = tl.load(values + held * (HEAD // 2) + start % PAGE * QUADS + v_offsets)
        else:
            tl.static_assert(TILE == 2 * PAGE)
            next_page = tl.load(TABLE + tl.minimum(start + PAGE, end) // PAGE).to(tl.int64)
            held = tl.where(t < PAGE, page, next_page) * KV_HEADS + kv_head
            packed = tl.load(SCALES + held * PAGE + in_page, mask=seen, other=0)
            k = tl.load(KP + (held * HEAD)[:, None] + k_offsets)
            v_quads = tl.load(values + (held * (HEAD // 2))[None, :] + v_offsets)
        if LOADS_FIRST:  # noqa: SIM102 (known when it is compiled; the other is not)
            if start == low:
                heads = new_heads(new, row, kv_head, KV_HEADS, GROUP, ROWS, D, DP, HALF, PARTS, BIAS, NORM, TYPE, EARLY)
                new_score, peak, new_v, v_scale, q, too_large, q_scale = _store_new(
                    heads, KP, VP, SCALES, slot, kv_head, scale, is_last, KV_HEADS, ROWS, D, DP, HALF, PAGE
                )
        score = tl.dot(bytes_as_half(k, ASM), q) * UNIT - too_large[None, :]
        score = tl.where(seen[:, None], score * (key_scale(packed) * q_scale)[:, None], float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score + value_power(packed)[:, None], 0))
        # A tile wholly before the window leaves the peak at -inf: then nothing has been seen and the factors are of zeros.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - safe[None, :])
        fade = tl.exp2(peak - safe)[None, :]
        totals = totals * fade + weight
        weight = (weight * value_scale(packed)[:, None]).to(tl.float16)
        zeros = zeros * fade + weight.to(tl.float32) * value_zero(packed)[:, None]
        quad1, quad2, quad3, quad4 = split_quads(v_quads, ASM)
        acc1 = tl.dot(quad1, weight, acc1 * fade)
        acc2 = tl.dot(quad2, weight, acc2 * fade)
        acc3 = tl.dot(quad3, weight, acc3 * fade)
        acc4 = tl.dot(quad4, weight, acc4 * fade)
        peak = new_peak
    total = tl.sum(totals, 0)
    acc1, acc2, acc3, acc4 = tl.trans(acc1), tl.trans(acc2), tl.trans(acc3), tl.trans(acc4)
    acc = in_order(acc1 * UNIT, acc2 * (UNIT / 16), acc3 * UNIT, acc4 * (UNIT / 16), ROWS, D) - tl.sum(zeros, 0)[:, None]
    new_weight = tl.where(is_last, tl.exp2(new_score - peak), 0.0)
    new_share = (new_weight * v_scale).to(tl.float16).to(tl.float32)
    return peak, total + new_weight, acc + new_share[:, None] * new_v[None, :]
