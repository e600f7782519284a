# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Queries, keys and values of many tokens: normed (Qwen3), rotated and stored in pages of any type (tiles.py)."""

import triton
import triton.language as tl

from lockstep.generation.gpu.float8 import encode, scale_of


@triton.jit
def rotate_and_store(
    QKV, B, OUT, COS, SIN, POSITION, SLOT, KP, VP, SCALES, Q_NORM, K_NORM, eps, width, stride_part,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_V: tl.constexpr,
    NORM: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, PAGE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Norm (Qwen3) and rotate q and k; write them to OUT, and k and v to their slot. PARTS 0: QKV is OUT, complete.

    Keys and values of pages of fewer bits are in OUT what the pages have.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(POSITION + token)
    slot = tl.load(SLOT + token)
    H2: tl.constexpr = D // 2
    TYPE: tl.constexpr = OUT.dtype.element_ty
    d = tl.arange(0, HALF)
    h = tl.arange(0, BLOCK_H)
    cos = tl.load(COS + position * H2 + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(SIN + position * H2 + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
    inner = h[:, None] * D + d[None, :]
    place = token * width + inner
    inside = (h < HEADS + KV_HEADS)[:, None] & (d < H2)[None, :]
    x1 = tl.load(QKV + place, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(QKV + place + H2, mask=inside, other=0.0).to(tl.float32)
    i = tl.arange(0, BLOCK_V)
    is_value = i < KV_HEADS * D
    v_start: tl.constexpr = (HEADS + KV_HEADS) * D
    v = tl.load(QKV + token * width + v_start + i, mask=is_value, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x1 += tl.load(QKV + part * stride_part + place, mask=inside, other=0.0)
        x2 += tl.load(QKV + part * stride_part + place + H2, mask=inside, other=0.0)
        v += tl.load(QKV + part * stride_part + token * width + v_start + i, mask=is_value, other=0.0)
    if BIAS:
        x1 += tl.load(B + inner, mask=inside, other=0.0).to(tl.float32)
        x2 += tl.load(B + inner + H2, mask=inside, other=0.0).to(tl.float32)
        v += tl.load(B + v_start + i, mask=is_value, other=0.0).to(tl.float32)
    x1 = x1.to(TYPE).to(tl.float32)
    x2 = x2.to(TYPE).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        q1 = tl.load(Q_NORM + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
        q2 = tl.load(Q_NORM + H2 + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
        k1 = tl.load(K_NORM + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
        k2 = tl.load(K_NORM + H2 + d, mask=d < H2, other=0.0).to(tl.float32)[None, :]
        is_query = (h < HEADS)[:, None]
        x1 = x1 * scale * tl.where(is_query, q1, k1)
        x2 = x2 * scale * tl.where(is_query, q2, k2)
        x1 = x1.to(TYPE).to(tl.float32)
        x2 = x2.to(TYPE).to(tl.float32)
    y1 = (x1 * cos - x2 * sin).to(TYPE)
    y2 = (x2 * cos + x1 * sin).to(TYPE)
    is_key = inside & (h >= HEADS)[:, None]
    if KEPT != "auto":
        VALUE_HEADS: tl.constexpr = BLOCK_V // D
        own = h - HEADS  # number of the key's head
        at = SCALES, slot // PAGE * KV_HEADS, slot % PAGE
        heads = tl.reshape(v.to(TYPE).to(tl.float32), [VALUE_HEADS, D])
        y1, y2 = _store_key_float8(KP, y1, y2, own, d, is_key, at, KV_HEADS, D, PAGE)
        heads = _store_value_float8(VP, heads, at, KV_HEADS, D, VALUE_HEADS, PAGE)
        v = tl.reshape(heads, [BLOCK_V])
        tl.store(OUT + token * width + v_start + i, v.to(TYPE), mask=is_value)
    tl.store(OUT + place, y1, mask=inside)
    tl.store(OUT + place + H2, y2, mask=inside)
    if KEPT == "auto":
        target = KP + slot * (KV_HEADS * D) + (h - HEADS)[:, None] * D + d[None, :]
        tl.store(target, y1, mask=is_key)
        tl.store(target + H2, y2, mask=is_key)
        tl.store(VP + slot * (KV_HEADS * D) + i, v.to(TYPE), mask=is_value)
        if PARTS > 0:
            tl.store(OUT + token * width + v_start + i, v.to(TYPE), mask=is_value)


@triton.jit
def _key_mask(own, KV_HEADS: tl.constexpr):
    return ((own >= 0) & (own < KV_HEADS))[:, None]


@triton.jit
def _store_key_float8(KP, y1, y2, own, d, is_key, at, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Store the two halves of keys, which are among the rows. Returns them as they are stored; the others as they were."""
    SCALES, page, place = at
    # Of both halves of a key the larger scale.
    scale1, inverse1 = scale_of(y1.to(tl.float32), 1)
    scale2, inverse2 = scale_of(y2.to(tl.float32), 1)
    scale = tl.where(scale1 > scale2, scale1, scale2) + (scale1 - scale1)
    inverse = tl.where(scale1 > scale2, inverse1, inverse2) + (scale1 - scale1)
    code1, code2 = encode(y1.to(tl.float32) * inverse), encode(y2.to(tl.float32) * inverse)
    target = KP + (page + own)[:, None] * (PAGE * D) + place * D + d[None, :]
    tl.store(target, code1, mask=is_key)
    tl.store(target + D // 2, code2, mask=is_key)
    # The half of the int32 that has both scales: keys and values are in different rows here.
    halves = SCALES.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    tl.store(halves + ((page + own) * PAGE + place)[:, None] * 2, scale.to(tl.bfloat16), mask=_key_mask(own, KV_HEADS))
    y1 = tl.where(is_key, (code1.to(tl.float32) * scale).to(y1.dtype), y1)
    return y1, tl.where(is_key, (code2.to(tl.float32) * scale).to(y2.dtype), y2)


@triton.jit
def _store_value_float8(VP, heads, at, KV_HEADS: tl.constexpr, D: tl.constexpr, VALUE_HEADS: tl.constexpr, PAGE: tl.constexpr):
    """Store values [VALUE_HEADS, D] of one token. Returns them as they are stored."""
    SCALES, page, place = at
    scale, inverse = scale_of(heads, 1)
    code = encode(heads * inverse)
    head = tl.arange(0, VALUE_HEADS)[:, None]
    tl.store(VP + (page + head) * (PAGE * D) + place * D + tl.arange(0, D)[None, :], code, mask=head < KV_HEADS)
    halves = SCALES.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    tl.store(halves + ((page + head) * PAGE + place) * 2 + 1, scale.to(tl.bfloat16), mask=head < KV_HEADS)
    return code.to(tl.float32) * scale
