# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""The parts of a decoder layer that are no matrix product, each in one pass over memory, forward and backward: RMS norm, rotary position
embedding, the gate of an MLP, and the sums of the residual stream. Sums are float32, and results are rounded once."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.linear_parts import LinearParts, added_product, gradients, products

_PROGRAMS = 132 * 8
"""Programs that share the rows of a norm's backward pass: each sums the weight's gradient over its own."""
_GATE_NUMBERS = 4096
"""Numbers of one program of a gate, in whole rows of a block."""


class SplitNormalise(torch.autograd.Function):
    """(x, x / sqrt(mean(x^2) + eps) * weight) over the last dimension of x [..., N]: a residual stream and what its norm gives, the latter
    in the weight's type.

    The two gradients that come back to x are added in the pass that computes the second.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        rows, size, block, tile = _tiling(x)
        out, scale = torch.empty_like(x, dtype=weight.dtype), torch.empty(rows, dtype=torch.float32, device=x.device)
        _normalise[(triton.cdiv(rows, tile),)](x, weight, out, scale, eps, rows, size, TILE=tile, BLOCK=block, num_warps=4)
        ctx.save_for_backward(x, weight, scale)
        ctx.set_materialize_grads(False)
        return x.view_as(x), out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        residual, grad = grads
        if grad is None:
            return residual, None, None
        grad = grad.contiguous()
        residual = None if residual is None else residual.contiguous()
        rows, size, block, tile = _tiling(x)
        programs = min(_PROGRAMS, triton.cdiv(rows, tile))
        dx = torch.empty_like(x)
        parts = torch.empty(programs, size, dtype=torch.float32, device=x.device)
        _normalise_backward[(programs,)](
            grad, grad if residual is None else residual, x, weight, scale, dx, parts, rows, size, programs,
            RESIDUAL=residual is not None, TILE=tile, BLOCK=block, num_warps=4,
        )  # fmt: skip
        return dx, parts.sum(0).to(weight.dtype), None


def _tiling(x: Tensor) -> tuple[int, int, int, int]:
    """Rows of x and their size, the power of 2 above it, and the rows of one tile."""
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    return x.numel() // size, size, block, max(1, 2048 // block)


class Project(torch.autograd.Function):
    """Several linear layers (linear_parts.py) of x [N, H] as one product, and parts of it: `scalings`, and their tensors in a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scalings: tuple[float, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        layers = _layers(scalings, tensors)
        whole, small = products(x, layers)
        ctx.scalings = scalings
        ctx.save_for_backward(x, *tensors, *small)
        return whole.split([len(layer.weight) for layer in layers], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        layers, small = _layers(ctx.scalings, saved), saved[4 * len(grads) :]
        dx, out = gradients(torch.cat(grads, 1), x, small, layers, needs, needs_x)
        return dx, None, *out


class AddProduct(torch.autograd.Function):
    """h + a linear layer without a bias (linear_parts.py) of x, for h [N, H] float32 and x [N, I]."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, x: Tensor, scaling: float, *tensors: Tensor | None) -> Tensor:
        out, small = added_product(h, x, _layers((scaling,), tensors)[0])
        ctx.scaling = scaling
        ctx.save_for_backward(x, *tensors, small)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors, small = ctx.saved_tensors
        _, needs_x, _, *needs = ctx.needs_input_grad
        dx, out = gradients(grads[0].to(x.dtype), x, [small], _layers((ctx.scaling,), tensors), needs, needs_x)
        return grads[0], dx, None, *out


def _layers(scalings: tuple[float, ...], tensors: Sequence[Tensor | None]) -> list[LinearParts]:
    """The layers whose tensors lie in a row."""
    return [LinearParts(*tensors[4 * i : 4 * i + 4], scaling=scaling) for i, scaling in enumerate(scalings)]  # type: ignore[arg-type, misc]


class Rotate(torch.autograd.Function):
    """x [1, H, N, D] rotated by `cos` and `sin` [1, N, D]; the result lies in memory as [N, H, D], as attention wants it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, backward=True), None, None


class GatedMLP(torch.autograd.Function):
    """h + down(silu(gate(x)) * up(x)) for h [N, H] float32 or None, x [N, H] and three linear layers without bias (linear_parts.py).

    What enters `down` is as wide as the two products it comes from, and is made again from them in the backward pass, where they are read
    anyway: a third less to keep.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor | None, x: Tensor, scalings: tuple[float, ...], *tensors: Tensor | None) -> Tensor:
        *into, down = _layers(scalings, tensors)
        both, (small_gate, small_up) = products(x, into)
        y = both.new_empty(len(x), len(into[0].weight))
        grid, tile, block = _columns(y)
        _gate[grid](both, y, *y.shape, ROWS=tile, BLOCK=block, num_warps=8)
        if h is None:
            out, (small_down,) = products(y, [down])
        else:
            out, small_down = added_product(h, y, down)
        ctx.scalings = scalings
        ctx.save_for_backward(x, both, small_gate, small_up, small_down, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, both, small_gate, small_up, small_down, *tensors = ctx.saved_tensors
        needs_h, needs_x, _, *needs = ctx.needs_input_grad
        *into, down = _layers(ctx.scalings, tensors)
        grad = grads[0].to(x.dtype).contiguous()
        y, _ = gradients(grad, x, [small_down], [down], (False,) * 4)
        assert y is not None
        d_both = torch.empty_like(both)
        grid, tile, block = _columns(y)
        _gate_backward[grid](y, both, d_both, *y.shape, ROWS=tile, BLOCK=block, num_warps=8)
        _, of_down = gradients(grad, y, [small_down], [down], needs[8:], needs_x=False)
        dx, of_gates = gradients(d_both, x, [small_gate, small_up], into, needs[:8], needs_x)
        return grads[0] if needs_h else None, dx, None, *of_gates, *of_down


def _columns(y: Tensor) -> tuple[tuple[int, int], int, int]:
    """How the kernels of a gate cut y [N, I]: their grid, rows of a program, and its columns, which divide I where a power of 2 does."""
    rows, width = y.shape
    block = min(1024, width & -width)
    block = block if block >= 64 else min(1024, triton.next_power_of_2(width))
    tile = _GATE_NUMBERS // block
    return (triton.cdiv(rows, tile), triton.cdiv(width, block)), tile, block


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    _, heads, tokens, size = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(tokens, heads, size, dtype=x.dtype, device=x.device)
    _rotate[(tokens,)](
        x, cos, sin, out, x.stride(1), x.stride(2), cos.stride(1), heads,
        HEADS=triton.next_power_of_2(heads), HALF=size // 2, BACKWARD=backward, num_warps=4,
    )  # fmt: skip
    return out.transpose(0, 1)[None]


@triton.jit
def _normalise(X, W, OUT, SCALE, eps, rows, size, TILE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < size)
    x = tl.load(X + row * size + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / size + eps)
    w = tl.load(W + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(OUT + row * size + column, (x * scale[:, None] * w).to(OUT.dtype.element_ty), mask=inside)
    first = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(SCALE + first, scale, mask=first < rows)


@triton.jit
def _normalise_backward(
    DY, RES, X, W, SCALE, DX, PARTS, rows, size, programs, RESIDUAL: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(W + column, mask=column < size, other=0.0).to(tl.float32)
    dw = tl.zeros((TILE, BLOCK), tl.float32)
    for start in range(program * TILE, rows, programs * TILE):
        row = start + tl.arange(0, TILE)[:, None]
        inside = (row < rows) & (column < size)
        scale = tl.load(SCALE + row, mask=row < rows, other=0.0)
        x = tl.load(X + row * size + column, mask=inside, other=0.0).to(tl.float32) * scale
        dy = tl.load(DY + row * size + column, mask=inside, other=0.0).to(tl.float32)
        dw += dy * x
        g = dy * w
        dx = scale * (g - x * (tl.sum(g * x, 1)[:, None] / size))
        if RESIDUAL:
            dx += tl.load(RES + row * size + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + row * size + column, dx.to(DX.dtype.element_ty), mask=inside)
    columns = tl.arange(0, BLOCK)
    tl.store(PARTS + program * size + columns, tl.sum(dw, 0), mask=columns < size)


@triton.jit
def _rotate(
    X, COS, SIN, OUT, x_head, x_token, cos_token, heads, HEADS: tl.constexpr, HALF: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, HALF)[None, :]
    inside = head < heads
    first = X + token * x_token + head * x_head + place
    a = tl.load(first, mask=inside).to(tl.float32)
    b = tl.load(first + HALF, mask=inside).to(tl.float32)
    angle = token * cos_token + place
    cos_a, cos_b = tl.load(COS + angle).to(tl.float32), tl.load(COS + angle + HALF).to(tl.float32)
    sin_a, sin_b = tl.load(SIN + angle).to(tl.float32), tl.load(SIN + angle + HALF).to(tl.float32)
    if BACKWARD:
        new_a, new_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        new_a, new_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    out = OUT + (token * heads + head) * (2 * HALF) + place
    tl.store(out, new_a.to(OUT.dtype.element_ty), mask=inside)
    tl.store(out + HALF, new_b.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _places(rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Where the numbers of a program lie in Y [N, I], where those of its gates in BOTH [N, 2 I], and which there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row * width + column, row * (2 * width) + column, (row < rows) & (column < width)


@triton.jit
def _gate(BOTH, OUT, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at, gates, inside = _places(rows, width, ROWS, BLOCK)
    g = tl.load(BOTH + gates, mask=inside).to(tl.float32)
    u = tl.load(BOTH + gates + width, mask=inside).to(tl.float32)
    tl.store(OUT + at, (g * tl.sigmoid(g) * u).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(Y, BOTH, DBOTH, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Y comes as the gradient of silu(gate) * up and is left as its value."""
    at, gates, inside = _places(rows, width, ROWS, BLOCK)
    dy = tl.load(Y + at, mask=inside).to(tl.float32)
    g = tl.load(BOTH + gates, mask=inside).to(tl.float32)
    u = tl.load(BOTH + gates + width, mask=inside).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(DBOTH + gates, (dy * u * s * (1.0 + g * (1.0 - s))).to(DBOTH.dtype.element_ty), mask=inside)
    tl.store(DBOTH + gates + width, (dy * g * s).to(DBOTH.dtype.element_ty), mask=inside)
    tl.store(Y + at, (g * s * u).to(Y.dtype.element_ty), mask=inside)
