# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Keys in eight bits and values in four (`rollout.kv_cache_dtype=k8v4`): integers, with a scale for each token's key and value of a head.

A key is (byte - 128) times its scale, which takes the head's largest number to 127. A value is (code - zero) times its scale: codes are 0
to 15, and `zero`, a multiple of 1/2, is the code that stands for 0, so that numbers of both signs, or mostly of one, use all codes. A key's
scale is a bfloat16 number, a value's has eight bits of exponent and three of mantissa, and both are rounded up, so that nothing is cut off,
but for what rounding the zero takes at one end: a quarter of a scale. A head that is not finite has a scale that is NaN, and so has all
that reads it.

Scales and zero lie together in 32 bits, which kernels read as one int32: the key's scale is the lower half; in the upper one are the
value's scale and twice the zero (5 bits). Four values lie in 16 bits, number 4 i of a head lowest.

Kernels do not convert codes: 16 bits that hold a small integer are a float16 number, that integer times 2^-24, which the matrix unit takes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LEAST = tl.constexpr(2.0**-100)
"""The least range that is divided by; numbers of a head that are all smaller become 0."""
UNIT = tl.constexpr(2.0**24)
"""What a code as float16 is to be multiplied with."""


def k8v4_at(k_pages: Tensor, v_pages: Tensor, scales: Tensor, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [N, kv_heads, D] of `slots` [N] int64."""
    page, place = slots // k_pages.shape[1], slots % k_pages.shape[1]
    packed = scales.view(torch.int32)[page, :, place]
    key_scale = (packed << 16).view(torch.float32)
    value_scale = ((packed >> 1) & 0x7FF00000).view(torch.float32)
    codes = v_pages[page, place]
    values = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float() - ((packed >> 16) & 31) / 2
    return ((k_pages[page, place].float() - 128) * key_scale).to(dtype), (values * value_scale).to(dtype)


@triton.jit
def rounded_up(x, BITS: tl.constexpr):
    """The least numbers with so many bits of mantissa that are no smaller than the positive float32 numbers x."""
    DROPPED: tl.constexpr = 23 - BITS
    return (((x.to(tl.int32, bitcast=True) + ((1 << DROPPED) - 1)) >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)


@triton.jit
def key_scale_of(x1, x2, AXIS: tl.constexpr):
    """The scale for keys, whose two halves lie along an axis, which is kept with length 1; and one divided by it."""
    largest = tl.maximum(tl.max(tl.maximum(tl.abs(x1), tl.abs(x2)), AXIS, keep_dims=True), _LEAST)
    not_finite = tl.sum((x1 - x1) + (x2 - x2), AXIS, keep_dims=True)  # NaN, or 0
    scale = rounded_up(largest * (1 / 127), 7) + not_finite
    return scale, 1.0 / scale


@triton.jit
def key_codes(x, inverse):
    """uint8 of keys times one divided by their scale."""
    size = x * inverse
    size = tl.where(size == size, size, 0.0)  # its scale says it: codes may be multiplied by 0
    return tl.floor(tl.minimum(tl.maximum(size + 128.5, 1.0), 255.0)).to(tl.int32).to(tl.uint8)


@triton.jit
def value_scale_of(x, AXIS: tl.constexpr):
    """Scale and zero for values along an axis, which is kept with length 1; and one divided by the scale."""
    low = tl.minimum(tl.min(x, AXIS, keep_dims=True), 0.0)
    high = tl.maximum(tl.max(x, AXIS, keep_dims=True), 0.0)
    not_finite = tl.sum(x - x, AXIS, keep_dims=True)  # NaN, or 0
    scale = rounded_up(tl.maximum(high - low, _LEAST) * (1 / 15), 3) + not_finite
    inverse = 1.0 / scale
    return scale, tl.floor(-2.0 * low * inverse + 0.5) * 0.5, inverse


@triton.jit
def value_codes(x, inverse, zero):
    """Numbers from 0 to 15, in float32, of values times one divided by their scale."""
    size = x * inverse + zero
    size = tl.where(size == size, size, 0.0)
    return tl.floor(tl.minimum(tl.maximum(size, 0.0), 15.0) + 0.5)


@triton.jit
def pack_codes(codes, N: tl.constexpr, QUADS: tl.constexpr):
    """int16 [N, QUADS] of the codes [N, 4 QUADS] of values."""
    shifts = (tl.arange(0, 4) * 4)[None, None, :]
    return tl.sum(tl.reshape(codes.to(tl.int32), [N, QUADS, 4]) << shifts, 2).to(tl.int16)


@triton.jit
def key_half(scale):
    """The lower 16 bits of what is stored beside codes."""
    return (scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF


@triton.jit
def value_half(scale, zero):
    """The upper 16 bits."""
    zero = tl.where(zero == zero, zero, 0.0)
    return ((scale.to(tl.int32, bitcast=True) >> 15) & 0xFFE0) | (zero * 2.0).to(tl.int32)


@triton.jit
def value_scale(packed):
    """Of the int32 of tokens; `float8.key_scale` reads the other half."""
    return ((packed >> 1) & 0x7FF00000).to(tl.float32, bitcast=True)


@triton.jit
def value_zero(packed):
    """The code that stands for 0."""
    return ((packed >> 16) & 31).to(tl.float32) * 0.5


@triton.jit
def value_power(packed):
    """The logarithm of `value_scale`, rounded down."""
    return (((packed >> 24) & 0xFF) - 127).to(tl.float32)


@triton.jit
def bytes_as_half(codes, ASM: tl.constexpr):
    """float16: the bytes of keys over UNIT."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;", "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    return codes.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def split_quads(quads, ASM: tl.constexpr):
    """float16 numbers: the four codes of values that are in each int16, the first and the third over UNIT, the others 16 times as large.
    (Of two int16 at once, as the matrix unit wants them, the GPU makes these in five instructions.)"""
    if ASM:
        first = tl.inline_asm_elementwise("and.b32 $0, $1, 0x000F000F;", "=r,r", [quads], dtype=tl.float16, is_pure=True, pack=2)
        second = tl.inline_asm_elementwise("and.b32 $0, $1, 0x00F000F0;", "=r,r", [quads], dtype=tl.float16, is_pure=True, pack=2)
        upper = tl.inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", [quads], dtype=tl.int16, is_pure=True, pack=2)
        third = tl.inline_asm_elementwise("and.b32 $0, $1, 0x000F000F;", "=r,r", [upper], dtype=tl.float16, is_pure=True, pack=2)
        fourth = tl.inline_asm_elementwise("and.b32 $0, $1, 0x00F000F0;", "=r,r", [upper], dtype=tl.float16, is_pure=True, pack=2)
    else:
        first = (quads & 0x0F).to(tl.float16, bitcast=True)
        second = (quads & 0xF0).to(tl.float16, bitcast=True)
        third = ((quads >> 8) & 0x0F).to(tl.float16, bitcast=True)
        fourth = ((quads >> 8) & 0xF0).to(tl.float16, bitcast=True)
    return first, second, third, fourth


@triton.jit
def in_order(first, second, third, fourth, N: tl.constexpr, D: tl.constexpr):
    """[N, D] of the numbers 4 i, 4 i + 1, 4 i + 2, 4 i + 3 of each line, which are [N, D / 4]."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [N, D])


@triton.jit
def decode_keys(codes, packed, TYPE: tl.constexpr):
    """The numbers [N, D] of the bytes of tokens [N]."""
    scale = (packed << 16).to(tl.float32, bitcast=True)[:, None]
    return ((bytes_as_half(codes, False).to(tl.float32) * UNIT - 128.0) * scale).to(TYPE)


@triton.jit
def decode_values(quads, packed, N: tl.constexpr, D: tl.constexpr, TYPE: tl.constexpr):
    """The numbers [N, D] of the int16 [N, D / 4] of tokens [N]."""
    first, second, third, fourth = split_quads(quads, False)
    scale, zero = value_scale(packed)[:, None], value_zero(packed)[:, None]
    return in_order(
        ((first.to(tl.float32) * UNIT - zero) * scale).to(TYPE),
        ((second.to(tl.float32) * (UNIT / 16) - zero) * scale).to(TYPE),
        ((third.to(tl.float32) * UNIT - zero) * scale).to(TYPE),
        ((fourth.to(tl.float32) * (UNIT / 16) - zero) * scale).to(TYPE),
        N,
        D,
    )
