# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Matrix products with few rows: all that counts is to read the weight once, with every multiprocessor busy.

A program takes 64 rows of the weight for all rows of x, over a part of the inputs. Where 64 rows a program make too few programs, the
inputs are cut into parts, and the partial sums are left to the kernel that reads them next: that saves the launch that would add them up.
Tiles come through tensor descriptors, which Hopper's copy engine reads. Of gate and up projection a program takes as many rows each, over
all inputs, and applies the gate: with up to 32 rows of x 32, small enough for two or three programs a multiprocessor, so that none waits
for another wave of them. While the kernel before ends, a program asks for its first weights (early.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.generation.gpu.early import begin, early, fetch, let_next

MOST_ROWS, MOST_GATED_ROWS, _MOST_WIDE_ROWS = 96, 64, 32
"""With more rows the library's products are faster, in wide models sooner (measured, docs/generation_speed.md)."""
_WIDE = 2048
"""Wider models than this: by the smaller side of a weight, which is the hidden size."""
_OUTPUTS = 64
_PROGRAMS = 128
_MOST_PARTS = 5
"""More parts take the kernel that adds them up longer than they save here; twice as many where there are many inputs."""


def takes(x: Tensor, weight: Tensor, most: int = MOST_ROWS) -> bool:
    """Whether the product of x [rows, K] and the weight [N, K] is computed here. Descriptors want rows of a multiple of 16 bytes."""
    if min(weight.shape) > _WIDE:
        most = _MOST_WIDE_ROWS
    return len(x) <= most and x.is_cuda and x.element_size() == 2 and weight.shape[1] % 8 == 0


def partial_products(x: Tensor, weight: Tensor, lets_first: bool = False) -> Tensor:
    """[parts, rows, N] float32 that add up to x [rows, K] @ weight [N, K]^T. `lets_first`: the next kernel has much to load that does not
    depend on this one, and may begin before this one has its x."""
    (rows, inputs), outputs = x.shape, len(weight)
    step, stages = _pipeline(rows)
    most = _MOST_PARTS if inputs < 4096 else 2 * _MOST_PARTS
    parts = max(1, min(_PROGRAMS // triton.cdiv(outputs, _OUTPUTS), triton.cdiv(inputs, step) // 2, most))
    # No room for tiles that a part does not have: the next kernel's programs, which begin beside these, need it.
    stages = min(stages, triton.cdiv(triton.cdiv(inputs, step), parts) + 1)
    out = torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device)
    padded = _padded(rows)
    _product[(triton.cdiv(outputs, _OUTPUTS), parts)](
        TensorDescriptor.from_tensor(x, [padded, step]), TensorDescriptor.from_tensor(weight, [_OUTPUTS, step]), weight, out, rows, outputs,
        K=inputs, BM=padded, BN=_OUTPUTS, BK=step, PARTS=parts, LETS_FIRST=lets_first, num_warps=4,
        num_stages=stages, **early(x),
    )  # fmt: skip
    return out


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """[rows, N]: silu(x @ gate^T) * (x @ up^T) with `weight` [2 N, K] the gate's rows and then the up projection's."""
    (rows, inputs), outputs = x.shape, len(weight) // 2
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tile, step, stages = (32, 128, 3) if rows <= 32 else (64, 64, 4)
    _gated_product[(triton.cdiv(outputs, tile),)](
        x, weight, out, rows, outputs, K=inputs, BM=_padded(rows), BN=tile, BK=step, num_warps=4, num_stages=stages, **early(x),
    )  # fmt: skip
    return out


def _pipeline(rows: int) -> tuple[int, int]:
    """Inputs of a tile, and tiles that are asked for ahead."""
    return (128, 4) if 32 < rows <= 64 else (64, 6)


def _padded(rows: int) -> int:
    """Rows of a tile of x."""
    return max(16, triton.next_power_of_2(rows))


@triton.jit
def _fetch_first(W, line, low, K: tl.constexpr, BK: tl.constexpr):
    """Ask for the rows `line` of the weight, from the inputs `low`: two steps of 16-bit numbers, in lines of 128 bytes."""
    ahead = tl.arange(0, BK // 32) * 64
    fetch(W + line[:, None].to(tl.int64) * K + tl.minimum(low + ahead, K - 1)[None, :])


@triton.jit
def _product(
    XD, WD, W, OUT, rows, outputs,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, LETS_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if LETS_FIRST:
        let_next(EARLY)
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    m = tl.arange(0, BM)
    part = tl.program_id(1)
    SHARE: tl.constexpr = ((K + BK - 1) // BK + PARTS - 1) // PARTS * BK
    low = part * SHARE
    if EARLY:
        _fetch_first(W, tl.minimum(n, outputs - 1), low, K, BK)
    begin(EARLY, LETS_NEXT=not LETS_FIRST)
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(low, tl.minimum(low + SHARE, K), BK):
        acc = tl.dot(WD.load([first, start]), tl.trans(XD.load([0, start])), acc)  # what is outside of either is read as 0
    place = OUT + (part * rows + m)[:, None] * outputs + n[None, :]
    tl.store(place, tl.trans(acc), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit
def _gated_product(
    X, W, OUT, rows, outputs, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    TYPE: tl.constexpr = OUT.dtype.element_ty
    k, m = tl.arange(0, BK), tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.arange(0, 2 * BN)
    # BN of the gate, then BN of the up projection. A row that there is none of is read as the last one, and not written.
    line = tl.minimum(tl.program_id(0) * BN + i % BN, outputs - 1) + i // BN * outputs
    if EARLY:
        _fetch_first(W, line, 0, K, BK)
    begin(EARLY, LETS_NEXT=False)
    w_place = W + line[:, None].to(tl.int64) * K + k[None, :]
    x_place = X + m[:, None] * K + k[None, :]
    acc = tl.zeros([2 * BN, BM], tl.float32)
    for start in range(0, K, BK):
        inside = (start + k < K)[None, :]
        w = tl.load(w_place + start, mask=inside, other=0.0)
        x = tl.load(x_place + start, mask=(m < rows)[:, None] & inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    # Only now: its programs fill the shared memory, and the next kernel's would take the place of some.
    let_next(EARLY)
    gate, up = tl.split(tl.permute(tl.reshape(tl.trans(acc), [BM, 2, BN]), (0, 2, 1)))
    # Rounded where training rounds (kernels/layers.py): after each projection, and once after the gate.
    gate = gate.to(TYPE).to(tl.float32)
    made = gate * tl.sigmoid(gate) * up.to(TYPE).to(tl.float32)
    tl.store(OUT + m[:, None] * outputs + n[None, :], made.to(TYPE), mask=(m < rows)[:, None] & (n < outputs)[None, :])
