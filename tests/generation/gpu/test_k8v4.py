"""Keys in eight bits and values in four in Triton's interpreter (see test_kernels.py): what is lost."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

import triton
import triton.language as tl
from helpers.small_pages import rounded_key, rounded_value

from lockstep.generation.gpu.float8 import key_scale
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


@triton.jit
def _keys(X, CODES, SCALES, N: tl.constexpr, D: tl.constexpr):
    n, d = tl.arange(0, N), tl.arange(0, D // 2)
    place = n[:, None] * D + d[None, :]
    x1, x2 = tl.load(X + place), tl.load(X + place + D // 2)
    scale, inverse = key_scale_of(x1, x2, 1)
    tl.store(CODES + place, key_codes(x1, inverse))
    tl.store(CODES + place + D // 2, key_codes(x2, inverse))
    tl.store(SCALES + n[:, None], scale)


@triton.jit
def _values(X, QUADS, SCALES, ZEROS, N: tl.constexpr, D: tl.constexpr):
    n, d, q = tl.arange(0, N), tl.arange(0, D), tl.arange(0, D // 4)
    x = tl.load(X + n[:, None] * D + d[None, :])
    scale, zero, inverse = value_scale_of(x, 1)
    tl.store(QUADS + n[:, None] * (D // 4) + q[None, :], pack_codes(value_codes(x, inverse, zero), N, D // 4))
    tl.store(SCALES + n[:, None], scale)
    tl.store(ZEROS + n[:, None], zero)


def heads() -> torch.Tensor:
    """[256, 64] of all sizes: of both signs, of one, and some with numbers of all sizes."""
    torch.manual_seed(0)
    made = torch.randn(256, 64)
    made[:64] = made[:64].abs()
    made[64:96] = -made[64:96].abs()
    made[128:192] *= torch.exp2(torch.randint(-20, 1, (64, 64)).float())
    made *= torch.exp2(torch.randint(-30, 30, (256, 1)).float())
    made[0], made[1, 1:] = 0.0, 0.0
    return made


def test_keys_are_off_by_half_a_scale_at_most() -> None:
    x, codes, scales = heads(), torch.zeros(256, 64, dtype=torch.uint8), torch.zeros(256, 1)
    _keys[(1,)](x, codes, scales, N=256, D=64)
    want, want_scales = rounded_key(x)
    assert torch.equal(codes.float() - 128, want)
    assert torch.equal(scales, want_scales)
    assert torch.equal(scales, scales.bfloat16().float())
    assert (scales[1:] <= x[1:].abs().amax(1, keepdim=True) / 127 * (1 + 2**-7)).all()
    error = (want.double() * scales.double() - x.double()).abs()
    assert (error <= 0.5001 * scales).all()
    assert error[0].max() == 0


def test_values_are_off_by_half_a_scale_and_at_an_end_by_what_the_zero_is_off() -> None:
    x, quads = heads(), torch.zeros(256, 16, dtype=torch.int16)
    scales, zeros = torch.zeros(256, 1), torch.zeros(256, 1)
    _values[(1,)](x, quads, scales, zeros, N=256, D=64)
    want, want_scales, want_zeros = rounded_value(x)
    codes = torch.stack([(quads.int() >> 4 * i) & 15 for i in range(4)], -1).flatten(1)
    assert torch.equal(codes.float(), want)
    assert torch.equal(scales, want_scales)
    assert torch.equal(zeros, want_zeros)
    assert set((2 * zeros).flatten().tolist()) <= set(range(31))
    reach = x.amax(1, keepdim=True).clamp_min(0) - x.amin(1, keepdim=True).clamp_max(0)
    assert (scales[1:] <= reach[1:] / 15 * (1 + 2**-3) * (1 + 1e-6)).all()
    error = ((want - zeros).double() * scales.double() - x.double()).abs()
    assert (error <= 0.5001 * scales).float().mean() > 0.99
    assert error.max() > 0
    assert (error <= 0.7501 * scales).all()
    assert error[0].max() == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_is_not_finite_has_scales_that_are_not_numbers(bad: float) -> None:
    x, codes, scales = torch.randn(4, 64), torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 1)
    x[2, 5] = bad
    _keys[(1,)](x, codes, scales, N=4, D=64)
    assert scales[:, 0].isnan().tolist() == [False, False, True, False]
    quads, zeros = torch.zeros(4, 16, dtype=torch.int16), torch.zeros(4, 1)
    _values[(1,)](x, quads, scales, zeros, N=4, D=64)
    assert scales[:, 0].isnan().tolist() == [False, False, True, False]


@triton.jit
def _pack(K, V, Z, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    packed = (value_half(tl.load(V + i), tl.load(Z + i)) << 16) | key_half(tl.load(K + i))
    tl.store(OUT + i, key_scale(packed))
    tl.store(OUT + N + i, value_scale(packed))
    tl.store(OUT + 2 * N + i, value_zero(packed))
    tl.store(OUT + 3 * N + i, value_power(packed))


def test_scales_and_zeros_come_apart_again() -> None:
    mantissa = 1 + torch.arange(128) % 8 / 8
    keys, values = torch.ldexp(mantissa, torch.arange(128) - 60), torch.ldexp(mantissa, 60 - torch.arange(128))
    zeros = torch.arange(128) % 31 / 2
    keys[7] = values[5] = values[9] = torch.nan
    zeros[9] = torch.nan
    out = torch.zeros(4, 128)
    _pack[(1,)](keys, values, zeros, out, N=128)
    torch.testing.assert_close(out[:2], torch.stack([keys, values]), atol=0, rtol=0, equal_nan=True)
    assert torch.equal(out[2], zeros.nan_to_num())
    finite = values.isfinite()
    assert torch.equal(out[3][finite], values[finite].log2().floor())


@triton.jit
def _split(QUADS, BYTES, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    first, second, third, fourth = split_quads(tl.load(QUADS + i)[:, None], False)
    codes = in_order(first.to(tl.float32), second.to(tl.float32) / 16, third.to(tl.float32), fourth.to(tl.float32) / 16, N, 4)
    tl.store(OUT + i[:, None] * 4 + tl.arange(0, 4)[None, :], codes * UNIT)
    tl.store(OUT + 4 * N + i, bytes_as_half(tl.load(BYTES + i), False).to(tl.float32) * UNIT)


def test_codes_are_numbers_as_they_are() -> None:
    codes = torch.randint(0, 16, (256, 4))
    quads = (codes << torch.arange(0, 16, 4)).sum(1).to(torch.int16)
    out = torch.zeros(256 * 5)
    _split[(1,)](quads, torch.arange(256).to(torch.uint8), out, N=256)
    assert torch.equal(out[:1024].view(256, 4), codes.float())
    assert torch.equal(out[1024:], torch.arange(256.0))
