# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""Linear layers with adapters beside them (LoRA): one product and one small kernel for all layers of an input.

The matrices A lie behind the weights (`fused.fuse_projections`), so the product that makes W x makes A x too. The kernel adds up the
product's parts and the bias, adds s B (A x), applies the gate where there is one, and rounds once.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.models.adapted import AdaptedLinear

_COLUMNS = 64

Join = Callable[[Sequence[Tensor]], Tensor | None]
Product = Callable[[Tensor, Tensor], Tensor]


def adapted_product(
    x: Tensor, linears: Sequence[AdaptedLinear], join: Join, product: Product, *, gated: bool = False
) -> Tensor | None:
    """[N, outputs of all]: the layers of x [N, inputs] side by side; with `gated` silu of the first times the second.

    `product(x, weight)` is [N, outputs], or [parts, N, outputs] that add up to it. None where the tensors do not lie as they should, or
    the adapters are not alike: then the layers have to be called one by one.
    """
    first = linears[0]
    rank, sizes = len(first.lora_A), [linear.out_features for linear in linears]
    alike = all(len(linear.lora_A) == rank and linear.scaling == first.scaling for linear in linears)
    weight = join([*(linear.weight for linear in linears), *(linear.lora_A for linear in linears)])
    ups = join([linear.lora_B for linear in linears])
    biased = first.bias is not None
    bias = join([linear.bias for linear in linears]) if biased else None
    if not alike or weight is None or ups is None or (biased and bias is None) or any(size % _COLUMNS for size in sizes):
        return None
    made = product(x, weight)
    made = made if made.dim() == 3 else made[None]
    outputs = sizes[0] if gated else sum(sizes)
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    rows = 16 if len(made) > 1 else 32  # more parts take more registers
    ends = [sum(sizes[: i + 1]) for i in range(3)]
    _finish[(triton.cdiv(outputs, _COLUMNS), triton.cdiv(len(x), rows))](
        made, ups if bias is None else bias, ups, out, len(x), outputs, sum(sizes), ends[0], ends[1], made.stride(1), made.stride(0),
        first.scaling, RANK=rank, BLOCK_R=max(16, triton.next_power_of_2(rank)), PARTS=made.shape[0], BIAS=biased, GATED=gated,
        BM=rows, BN=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _layer(
    Y, B, UP, m, n, layer, rows, all_outputs, stride_y, stride_part, scaling,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """[BM, BN] float32: the columns n of all layers, which are those of number `layer`."""
    r = tl.arange(0, BLOCK_R)
    inside = (m < rows)[:, None]
    y = tl.zeros([BM, BN], tl.float32)
    down = tl.zeros([BM, BLOCK_R], tl.float32)
    base = Y + m[:, None].to(tl.int64) * stride_y
    for part in tl.static_range(PARTS):
        y += tl.load(base + part * stride_part + n[None, :], mask=inside, other=0.0).to(tl.float32)
        place = base + part * stride_part + (all_outputs + layer * RANK + r)[None, :]
        down += tl.load(place, mask=inside & (r < RANK)[None, :], other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(B + n)[None, :].to(tl.float32)
    up = tl.load(UP + n[:, None].to(tl.int64) * RANK + r[None, :], mask=(r < RANK)[None, :], other=0.0)
    # A x is rounded as training rounds it.
    return y + scaling * tl.dot(down.to(TYPE), tl.trans(up), input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def _finish(
    Y, B, UP, OUT, rows, outputs, all_outputs, first_end, second_end, stride_y, stride_part, scaling,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = OUT.dtype.element_ty
    start = tl.program_id(0) * BN
    n = start + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    layer = (start >= first_end).to(tl.int32) + (start >= second_end).to(tl.int32)
    y = _layer(Y, B, UP, m, n, layer, rows, all_outputs, stride_y, stride_part, scaling, RANK, BLOCK_R, PARTS, BIAS, BM, BN, TYPE)
    if GATED:
        # Rounded where training rounds: after each projection, and once after the gate.
        gate = y.to(TYPE).to(tl.float32)
        up = _layer(
            Y, B, UP, m, n + outputs, 1, rows, all_outputs, stride_y, stride_part, scaling, RANK, BLOCK_R, PARTS, BIAS, BM, BN, TYPE
        )
        y = gate * tl.sigmoid(gate) * up.to(TYPE).to(tl.float32)
    tl.store(OUT + m[:, None].to(tl.int64) * outputs + n[None, :], y.to(TYPE), mask=(m < rows)[:, None])
