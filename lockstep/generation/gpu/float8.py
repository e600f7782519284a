# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Keys and values in eight bits (`rollout.kv_cache_dtype=fp8`): float8 e4m3 with a scale for each token's key and value of a KV head.

A scale is the power of two that takes a head's largest number into [128, 256), so that nothing but the mantissa's bits is lost: a number is
off by 2^-4 of itself at most, or by 2^-17 of the head's largest one where it is small beside it. A number times its scale is exact in
bfloat16. A head that is not finite has a scale that is NaN, and so has all that reads it.

The scales of key and value lie together, as two bfloat16 numbers that kernels read as one int32: `scales` [pages, kv_heads, page_size, 2].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def pages_at(k_pages: Tensor, v_pages: Tensor, scales: Tensor, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [N, kv_heads, D] of `slots` [N] int64."""
    page = slots // k_pages.shape[1]
    place = slots % k_pages.shape[1]
    key_scale, value_scale = scales[page, :, place].unbind(-1)
    pairs = ((k_pages, key_scale), (v_pages, value_scale))
    # A view: indexing of float8 is not everywhere.
    keys, values = (
        pages.view(torch.uint8)[page, place].view(pages.dtype).to(dtype) * scale[..., None].to(dtype) for pages, scale in pairs
    )
    return keys, values


def packed_scales(scales: Tensor | None, otherwise: Tensor) -> Tensor:
    """What a kernel gets for `scales`: one int32 for each pair, or `otherwise` where there are none and nobody reads them."""
    return otherwise if scales is None else scales.view(torch.int32)


@triton.jit
def power_below(x):
    """The largest powers of two that are no larger than the numbers, and one divided by them: exactly, as a division may not be."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(x, AXIS: tl.constexpr):
    """The scale for the numbers along an axis, which is kept with length 1, and one divided by it."""
    largest = tl.maximum(tl.max(tl.abs(x), AXIS, keep_dims=True), 2.0**-33)
    not_finite = tl.sum(x - x, AXIS, keep_dims=True)  # NaN, or 0
    power, inverse = power_below(largest)
    return power * 2.0**-7 + not_finite, inverse * 2.0**7 + not_finite


@triton.jit
def encode(x):
    """float8 of float32 numbers of at most 448, rounded to the nearest, ties to even. Triton's interpreter rounds small ones otherwise."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(
        tl.int32, bitcast=True
    ) - 0x46800000  # steps of 2^-9, as the sum has them
    code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    code = tl.where(x == x, code, 0)  # its scale says it: codes are finite always, and may be multiplied by 0
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def pack_scales(k_scale, v_scale):
    """The int32 of two scales."""
    high = v_scale.to(tl.int32, bitcast=True) & -65536
    return high | ((k_scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)


@triton.jit
def key_scale(packed):
    return (packed << 16).to(tl.float32, bitcast=True)


@triton.jit
def value_scale(packed):
    return (packed & -65536).to(tl.float32, bitcast=True)


@triton.jit
def value_power(packed):
    """The logarithm of `value_scale`."""
    return (((packed >> 23) & 0xFF) - 127).to(tl.float32)


@triton.jit
def decode(codes, scale, TYPE: tl.constexpr):
    """The numbers; `scale` is one for each, or broadcasts."""
    return (codes.to(tl.float16).to(tl.float32) * scale).to(TYPE)


@triton.jit
def split_pairs(pairs, ASM: tl.constexpr):
    """float16 numbers, without their scales: the first and the second of the two float8 numbers in each int16. (Of two int16 at once, as
    the matrix unit wants them, the GPU makes these in three instructions.)"""
    if ASM:
        sorted_bytes = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x3120;", "=r,r", [pairs], dtype=tl.int16, is_pure=True, pack=2
        )
        first = tl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, a;}",
            "=r,r", [sorted_bytes], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        second = tl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, b;}",
            "=r,r", [sorted_bytes], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return first, second
