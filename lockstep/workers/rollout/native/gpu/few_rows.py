# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Matrix products with few rows: all that counts is to read the weight once, with every multiprocessor busy.

A program takes 64 rows of the weight for all rows of x, over a part of the inputs. Where 64 rows a program make too few programs, the
inputs are cut into parts, and the partial sums are left to the kernel that reads them next: that saves the launch that would add them up.
Of gate and up projection a program takes 32 rows each, over all inputs, and applies the gate: small enough for two or three programs a
multiprocessor, so that none waits for another wave of them. While the kernel before ends, a program asks for its first weights (early.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.workers.rollout.native.gpu.early import begin, early, fetch

MOST_ROWS = 32
"""With more rows the library's products are faster (measured, docs/generation_gpu.md)."""
_OUTPUTS = 64
_PROGRAMS = 128
_MOST_PARTS = 5
"""More parts take the kernel that adds them up longer than they save here; twice as many where there are many inputs."""


def partial_products(x: Tensor, weight: Tensor) -> Tensor:
    """[parts, rows, N] float32 that add up to x [rows, K] @ weight [N, K]^T."""
    (rows, inputs), outputs = x.shape, len(weight)
    step = 64
    most = _MOST_PARTS if inputs < 4096 else 2 * _MOST_PARTS
    parts = max(1, min(_PROGRAMS // triton.cdiv(outputs, _OUTPUTS), triton.cdiv(inputs, step) // 2, most))
    out = torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device)
    _product[(triton.cdiv(outputs, _OUTPUTS), parts)](
        x, weight, out, rows, outputs, K=inputs, BM=max(16, triton.next_power_of_2(rows)), BN=_OUTPUTS, BK=step, PARTS=parts,
        num_warps=4, num_stages=6, **early(x),
    )  # fmt: skip
    return out


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, N]: silu(x @ gate^T) * (x @ up^T) with `weight` [2 N, K] the gate's rows and then the up projection's."""
    (rows, inputs), outputs = x.shape, len(weight) // 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _gated_product[(triton.cdiv(outputs, _OUTPUTS // 2),)](
        x, weight, out, rows, outputs, K=inputs, BM=max(16, triton.next_power_of_2(rows)), BN=_OUTPUTS // 2, BK=128,
        num_warps=4, num_stages=3, **early(x),
    )  # fmt: skip
    return out


@triton.jit
def _dot(
    X, W, line, m, rows, low, high,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, LETS_NEXT: tl.constexpr,
):  # fmt: skip
    """[BN, BM] float32: the rows `line` of W times the rows m of X, over the inputs from `low` to `high`. X is of the kernel before."""
    k = tl.arange(0, BK)
    w_line = W + line[:, None].to(tl.int64) * K
    if EARLY:
        ahead = tl.arange(0, BK // 32) * 64  # two steps of 16-bit numbers, in lines of 128 bytes
        fetch(w_line + tl.minimum(low + ahead, K - 1)[None, :])
    begin(EARLY, LETS_NEXT)
    w_place = w_line + k[None, :]
    x_place = X + m[:, None] * K + k[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(low, high, BK):
        inside = (start + k < high)[None, :]
        w = tl.load(w_place + start, mask=inside, other=0.0)
        x = tl.load(x_place + start, mask=(m < rows)[:, None] & inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    return acc


@triton.jit
def _product(
    X, W, OUT, rows, outputs,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    part = tl.program_id(1)
    SHARE: tl.constexpr = ((K + BK - 1) // BK + PARTS - 1) // PARTS * BK
    low = part * SHARE
    # A row that there is none of is read as the last one, and not written.
    line, high = tl.minimum(n, outputs - 1), tl.minimum(low + SHARE, K)
    made = _dot(X, W, line, m, rows, low, high, K, BM, BN, BK, EARLY, LETS_NEXT=True)
    place = OUT + (part * rows + m)[:, None] * outputs + n[None, :]
    tl.store(place, tl.trans(made), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit
def _gated_product(
    X, W, OUT, rows, outputs, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    TYPE: tl.constexpr = OUT.dtype.element_ty
    m = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.arange(0, 2 * BN)
    line = (
        tl.minimum(tl.program_id(0) * BN + i % BN, outputs - 1) + i // BN * outputs
    )  # BN of the gate, then BN of the up projection
    # Its programs fill the shared memory: the next kernel's would take the place of some.
    both = tl.trans(_dot(X, W, line, m, rows, 0, K, K, BM, 2 * BN, BK, EARLY, LETS_NEXT=False))
    gate, up = tl.split(tl.permute(tl.reshape(both, [BM, 2, BN]), (0, 2, 1)))
    # Rounded where training rounds (models/layer_kernels.py): after each projection, and once after the gate.
    gate = gate.to(TYPE).to(tl.float32)
    made = gate * tl.sigmoid(gate) * up.to(TYPE).to(tl.float32)
    tl.store(OUT + m[:, None] * outputs + n[None, :], made.to(TYPE), mask=(m < rows)[:, None] & (n < outputs)[None, :])
