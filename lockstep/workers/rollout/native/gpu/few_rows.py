# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Matrix products with few rows: all that counts is to read the weight once, with every multiprocessor busy.

A program computes 64 outputs for all rows over a part of the inputs. Where 64 outputs a program make too few programs, the inputs are cut
into parts, and the partial sums are left to the kernel that reads them next: that saves the launch that would add them up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 32
"""With more rows the library's products are faster (measured, docs/generation.md)."""
_OUTPUTS = 64
_PROGRAMS = 128


def partial_products(x: Tensor, weight: Tensor) -> Tensor:
    """[parts, rows, N] float32 that add up to x [rows, K] @ weight [N, K]^T."""
    (rows, inputs), outputs = x.shape, len(weight)
    step = 256 if inputs >= 4096 else 128
    parts = max(1, min(_PROGRAMS // triton.cdiv(outputs, _OUTPUTS), triton.cdiv(inputs, step) // 2))
    out = torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device)
    _product[(triton.cdiv(outputs, _OUTPUTS), parts)](
        x, weight, out, rows, outputs, inputs, BM=max(16, triton.next_power_of_2(rows)), BN=_OUTPUTS, BK=step, PARTS=parts, GATED=False,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, N]: silu(x @ gate^T) * (x @ up^T) with `weight` [2 N, K] the gate's rows and then the up projection's."""
    (rows, inputs), outputs = x.shape, len(weight) // 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(outputs, _OUTPUTS), 1)](
        x, weight, out, rows, outputs, inputs, BM=max(16, triton.next_power_of_2(rows)), BN=_OUTPUTS, BK=128, PARTS=1, GATED=True,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _product(
    X, W, OUT, rows, outputs, inputs,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    part = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(inputs, BK), PARTS) * BK
    low = part * share
    high = tl.minimum(low + share, inputs)
    acc = tl.zeros([BN, BM], tl.float32)
    acc_up = tl.zeros([BN, BM], tl.float32)
    w_place = W + n[:, None].to(tl.int64) * inputs + k[None, :]
    x_place = X + m[:, None] * inputs + k[None, :]
    for start in range(low, high, BK):
        inside = (start + k < high)[None, :]
        w = tl.load(w_place + start, mask=(n < outputs)[:, None] & inside, other=0.0)
        x = tl.load(x_place + start, mask=(m < rows)[:, None] & inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
        if GATED:
            up = tl.load(w_place + outputs * inputs + start, mask=(n < outputs)[:, None] & inside, other=0.0)
            acc_up = tl.dot(up, tl.trans(x), acc_up)
    if GATED:
        # Rounded where training rounds (models/layer_kernels.py): after each projection, and once after the gate.
        gate = acc.to(OUT.dtype.element_ty).to(tl.float32)
        acc = gate * tl.sigmoid(gate) * acc_up.to(OUT.dtype.element_ty).to(tl.float32)
    place = OUT + (part * rows + m)[:, None] * outputs + n[None, :]
    tl.store(place, tl.trans(acc).to(OUT.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])
