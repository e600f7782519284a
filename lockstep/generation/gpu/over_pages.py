# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""A new token's attention over one split of the pages of its sequence (new_token.py)."""

import triton
import triton.language as tl

from lockstep.generation.gpu.new_heads import new_heads, score_of


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
