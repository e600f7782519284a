"""Keys and values as float8 in Triton's interpreter (see test_kernels.py): what is lost."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: triton reads it when it is imported", allow_module_level=True)

import triton
import triton.language as tl
from helpers.small_pages import rounded

from lockstep.generation.gpu.float8 import (
    encode,
    key_scale,
    pack_scales,
    scale_of,
    split_pairs,
    value_power,
    value_scale,
)


@triton.jit
def _quantise(X, CODES, SCALES, N: tl.constexpr, D: tl.constexpr):
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    x = tl.load(X + n[:, None] * D + d[None, :])
    scale, inverse = scale_of(x, 1)
    tl.store(CODES + n[:, None] * D + d[None, :], encode(x * inverse))
    tl.store(SCALES + n[:, None], scale)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels make of heads [n, D]: codes, and scales [n, 1]."""
    codes = torch.zeros(x.shape).to(torch.float8_e4m3fn)
    scales = torch.zeros(len(x), 1)
    _quantise[(1,)](x, codes, scales, N=x.shape[0], D=x.shape[1])
    return codes, scales


def test_numbers_are_rounded_to_the_nearest_and_off_by_no_more_than_is_stated() -> None:
    torch.manual_seed(0)
    heads = torch.randn(256, 64) * torch.exp2(torch.randint(-30, 30, (256, 1)).float())
    heads[:128] *= torch.exp2(torch.randint(-20, 1, (128, 64)).float())  # all sizes in one head
    heads[0], heads[1, 1:] = 0.0, 0.0
    codes, scales = quantised(heads)
    want, want_scales = rounded(heads[1:])
    assert torch.equal(codes[1:].view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales[1:].double(), want_scales)
    assert codes[0].float().abs().max() == 0
    assert torch.equal(scales, scales.bfloat16().float())
    back = codes.double() * scales.double()
    assert torch.equal(back, back.bfloat16().double()), "bfloat16 has room for all of it"
    largest = heads.double().abs().amax(1, keepdim=True)
    assert ((back - heads.double()).abs() <= torch.maximum(heads.double().abs() / 16, largest / 2**17)).all()
    error = (back - heads.double())[128:].norm(dim=1) / heads.double()[128:].norm(dim=1)
    assert error.max() < 0.04, "of normal numbers"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_is_not_finite_has_a_scale_that_is_not_a_number_and_finite_codes(bad: float) -> None:
    heads = torch.randn(4, 32)
    heads[2, 5] = bad
    codes, scales = quantised(heads)
    assert scales[:, 0].isnan().tolist() == [False, False, True, False]
    assert codes.float().isfinite().all()


@triton.jit
def _unpack(A, B, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    packed = pack_scales(tl.load(A + i), tl.load(B + i))
    tl.store(OUT + i, key_scale(packed))
    tl.store(OUT + N + i, value_scale(packed))
    tl.store(OUT + 2 * N + i, value_power(packed))


@triton.jit
def _split(PAIRS, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    first, second = split_pairs(tl.load(PAIRS + i), False)
    tl.store(OUT + 2 * i, first)
    tl.store(OUT + 2 * i + 1, second)


def test_scales_and_pairs_come_apart_again() -> None:
    powers = torch.arange(-40, 88, dtype=torch.float32)
    out = torch.zeros(3, 128)
    _unpack[(1,)](powers.exp2(), powers.flip(0).exp2(), out, N=128)
    assert torch.equal(out, torch.stack([powers.exp2(), powers.flip(0).exp2(), powers.flip(0)]))
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127].repeat(2)[:256]  # not those that are no numbers
    numbers = torch.zeros(256, dtype=torch.float16)
    _split[(1,)](codes.view(torch.int16), numbers, N=128)
    assert torch.equal(numbers.float(), codes.view(torch.float8_e4m3fn).float())
