# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Tiles of keys and values in pages of any type (`rollout.kv_cache_dtype`), as numbers that products are made of.

KEPT is auto: tokens, KV heads, numbers lie in this order, in the type of the queries. Or it is fp8 (float8.py): KV heads come first, and
a tile's scales are given as the int32 of each token.
"""

import triton
import triton.language as tl

from lockstep.generation.gpu.float8 import decode, key_scale, value_scale


@triton.jit
def head_start(page, kv_head, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, KEPT: tl.constexpr):
    """Where a KV head of a page begins, in elements."""
    HEAD: tl.constexpr = D if KEPT == "auto" else PAGE * D
    return page * (KV_HEADS * PAGE * D) + kv_head * HEAD


@triton.jit
def scales_at(SCALES, page, kv_head, first, t, seen, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, KEPT: tl.constexpr):
    """The int32 of the tokens `first` + t of a page; 0 where pages have no scales. `seen` None: all are."""
    place = (page * KV_HEADS + kv_head) * PAGE + first + t
    if KEPT == "auto":
        packed = 0
    elif seen is None:
        packed = tl.load(SCALES + place)
    else:
        packed = tl.load(SCALES + place, mask=seen, other=0)
    return packed


@triton.jit
def keys_at(KP, head, first, t, d, mask, packed, KV_HEADS: tl.constexpr, D: tl.constexpr, KEPT: tl.constexpr, TYPE: tl.constexpr):
    """[TILE, DP] of the tokens `first` + t of the page whose head begins at `head`. `mask` None: all of it is there."""
    TOKEN: tl.constexpr = KV_HEADS * D if KEPT == "auto" else D
    place = KP + (head + first * TOKEN) + (t[:, None] * TOKEN + d[None, :])
    if mask is None:
        k = tl.load(place)
    else:
        k = tl.load(place, mask=mask, other=0.0)
    if KEPT == "fp8":
        k = decode(k, key_scale(packed)[:, None], TYPE)
    return k


@triton.jit
def values_at(
    VP, head, first, t, d, mask, packed,
    KV_HEADS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, KEPT: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """As `keys_at`, for values."""
    TOKEN: tl.constexpr = KV_HEADS * D if KEPT == "auto" else D
    place = VP + (head + first * TOKEN) + (t[:, None] * TOKEN + d[None, :])
    if mask is None:
        v = tl.load(place)
    else:
        v = tl.load(place, mask=mask, other=0.0)
    if KEPT == "fp8":
        v = decode(v, value_scale(packed)[:, None], TYPE)
    return v
