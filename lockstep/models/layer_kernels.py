# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""The parts of a decoder layer that are no matrix product, each in one pass over memory, forward and backward: RMS norm, rotary position
embedding, the gate of an MLP, and the sums of the residual stream. Sums are float32, and results are rounded once."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

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
    """x w^T + b for x [N, H] and several (w, b) in a row, b or None: one product with all weights end to end, and parts of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *parameters)
        weights, biases = (_present(parameters[i::2]) for i in range(2))
        ctx.sizes = [len(weight) for weight in weights]
        return F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None).split(ctx.sizes, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad
        grad = torch.cat(grads, 1)
        dx = grad @ torch.cat(_present(parameters[::2])) if needs_x else None
        dw = (grad.t() @ x).split(ctx.sizes) if any(needs[::2]) else [None] * len(grads)
        db = grad.sum(0).split(ctx.sizes) if any(needs[1::2]) else [None] * len(grads)
        return dx, *(part if need else None for part, need in zip(_in_turn(dw, db), needs, strict=True))


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _in_turn(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [x for pair in zip(first, second, strict=True) for x in pair]


class AddProduct(torch.autograd.Function):
    """h + x w^T for h [N, H] float32, x [N, I] and w [H, I]."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(h, x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight = ctx.needs_input_grad
        grad = grads[0].to(x.dtype)
        return grads[0], grad @ weight if needs_x else None, grad.t() @ x if needs_weight else None


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
    """h + (silu(x gate^T) * (x up^T)) down^T for h [N, H] float32 or None, x [N, H] and weights [I, H], [I, H], [H, I].

    What enters `down` is as wide as the two products it comes from, and is made again from them in the backward pass, where they are read
    anyway: a third less to keep.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor | None, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        both = x @ torch.cat([gate, up]).t()
        ctx.save_for_backward(x, gate, up, down, both)
        y = both.new_empty(len(x), len(gate))
        grid, tile, block = _columns(y)
        _gate[grid](both, y, *y.shape, ROWS=tile, BLOCK=block, num_warps=8)
        return y @ down.t() if h is None else torch.addmm(h, y, down.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, both = ctx.saved_tensors
        needs_h, needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad
        grad = grads[0].to(x.dtype).contiguous()
        y, d_both = grad @ down, torch.empty_like(both)
        grid, tile, block = _columns(y)
        _gate_backward[grid](y, both, d_both, *y.shape, ROWS=tile, BLOCK=block, num_warps=8)
        of_gate, of_up = (d_both.t() @ x).chunk(2) if needs_gate or needs_up else (None, None)
        return (
            grads[0] if needs_h else None,
            d_both @ torch.cat([gate, up]) if needs_x else None,
            of_gate if needs_gate else None,
            of_up if needs_up else None,
            grad.t() @ y if needs_down else None,
        )


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
