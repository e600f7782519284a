# mypy: disable-error-code="no-untyped-def"
# (Triton kernels take no Python types.)
"""The experts of a mixture as grouped products with one pass over memory between them, forward and backward.

Each token is computed by its k experts: S = N k pairs, sorted by expert, so that an expert's are rows in a line. Sums are float32, and
results are rounded once. Only the input and the products into the gate are kept for the backward pass. Nothing is added up atomically.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_MOST_COUNTED = 1 << 16
"""Up to so many pairs, every expert looks for its own among all; more are sorted."""


class Pairs(NamedTuple):
    """The pairs of tokens and experts."""

    token: Tensor
    """[S] int32: whose each is, sorted by expert."""
    place: Tensor
    """[N, k] int32: where the pairs of a token are."""
    ends: Tensor
    """[experts] int32: where the pairs of each expert end."""


def pairs_of(chosen: Tensor, experts: int) -> Pairs:
    """The pairs of tokens that go to the experts `chosen` [N, k], those of an expert in the order of the tokens. Nothing here waits for
    the device."""
    total, k = chosen.numel(), chosen.shape[1]
    made: dict[str, Any] = {"dtype": torch.int32, "device": chosen.device}
    pairs = Pairs(torch.empty(total, **made), torch.empty(chosen.shape, **made), torch.empty(experts, **made))
    if total <= _MOST_COUNTED:
        _count[(experts,)](chosen.contiguous(), *pairs, total, K=k, BLOCK=2048, num_warps=8)
        return pairs
    # The fewer bytes a number has, the fewer passes a sort takes.
    sorted_experts, order = torch.sort(chosen.flatten().to(torch.uint8 if experts <= 256 else torch.int16), stable=True)
    pairs.place.view(-1)[order] = torch.arange(total, **made)
    numbers = torch.arange(experts, device=chosen.device, dtype=sorted_experts.dtype)
    return Pairs((order // k).int(), pairs.place, torch.searchsorted(sorted_experts, numbers, right=True).int())


def experts_product(
    h: Tensor | None, x: Tensor, pairs: Pairs, weights: Tensor, gate_up: Tensor, down: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(h + sum over the experts e of a token of weight * down_e(silu(gate_e(x)) * up_e(x)), and the products into the gate [S, 2 I]).

    h [N, H] float32 or None, x [N, H], `weights` [N, k], `gate_up` [E, 2 I, H], `down` [E, H, I]. The sum is in the type of h, or of x;
    in `out`, which may be h itself, where it is given.
    """
    products = F.grouped_mm(x[pairs.token], gate_up.transpose(1, 2), offs=pairs.ends)
    inner = torch.empty(len(products), products.shape[1] // 2, dtype=x.dtype, device=x.device)
    _gate[(triton.cdiv(inner.numel(), _BLOCK),)](products, inner, inner.numel(), inner.shape[1], BLOCK=_BLOCK, num_warps=4)
    made = F.grouped_mm(inner, down.transpose(1, 2), offs=pairs.ends)
    return _combined(h, made, pairs.place, weights, out), products


class Experts(torch.autograd.Function):
    """The first result of `experts_product`, with gradients of h, x, the weights, and the experts' parameters."""

    @staticmethod
    def forward(ctx: Any, h: Tensor | None, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        pairs = pairs_of(chosen, len(down))
        out, products = experts_product(h, x, pairs, weights, gate_up, down)
        ctx.save_for_backward(x, weights, gate_up, down, products, *pairs)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, products, *saved = ctx.saved_tensors
        pairs = Pairs(*saved)
        needs_h, needs_x, _, needs_weights, needs_gate_up, needs_down = ctx.needs_input_grad
        grad = grads[0].to(x.dtype)[pairs.token]
        inner = F.grouped_mm(grad, down, offs=pairs.ends)
        d_products = torch.empty_like(products)
        of_pair = torch.empty(len(inner), dtype=torch.float32, device=x.device)
        of_pair[pairs.place.flatten()] = weights.flatten().float()
        d_of_pair = torch.empty_like(of_pair)
        _gate_backward[(len(inner),)](
            inner, products, of_pair, d_products, d_of_pair, inner.shape[1], BLOCK=min(_BLOCK, triton.next_power_of_2(inner.shape[1])),
            num_warps=4,
        )  # fmt: skip
        d_weights = d_of_pair[pairs.place.flatten()].view(weights.shape).to(weights.dtype)
        d_down = F.grouped_mm(grad.t(), inner, offs=pairs.ends) if needs_down else None
        del grad
        d_gate_up = F.grouped_mm(d_products.t(), x[pairs.token], offs=pairs.ends) if needs_gate_up else None
        dx = _combined(None, F.grouped_mm(d_products, gate_up, offs=pairs.ends), pairs.place, None, None) if needs_x else None
        return grads[0] if needs_h else None, dx, None, d_weights if needs_weights else None, d_gate_up, d_down


def _combined(h: Tensor | None, made: Tensor, place: Tensor, weights: Tensor | None, out: Tensor | None) -> Tensor:
    """[N, H]: h + for each token the sum of its pairs in `made` [S, H], times their weights."""
    (rows, k), size = place.shape, made.shape[1]
    if out is None:
        out = torch.empty(rows, size, dtype=made.dtype if h is None else h.dtype, device=made.device)
    _combine[(rows, triton.cdiv(size, _BLOCK))](
        made if h is None else h, made, place, made if weights is None else weights, out, size,
        K=k, ADD=h is not None, WEIGHTED=weights is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _count(CHOSEN, TOKEN, PLACE, ENDS, total, K: tl.constexpr, BLOCK: tl.constexpr):
    """One expert: its pairs come behind those of all experts with lower numbers."""
    expert = tl.program_id(0)
    lower = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        chosen = tl.load(CHOSEN + i, mask=i < total, other=1 << 30)
        lower += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    place = tl.sum(lower, 0)
    tl.store(ENDS + expert, place + tl.sum(own, 0))
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mine = tl.load(CHOSEN + i, mask=i < total, other=1 << 30) == expert
        at = place + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(PLACE + i, at, mask=mine)
        tl.store(TOKEN + at, i // K, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def _gate(GU, OUT, total, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    place = at // size * (2 * size) + at % size
    g = tl.load(GU + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(GU + place + size, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + at, (g * tl.sigmoid(g) * u).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(Y, GU, W, DGU, DW, size, BLOCK: tl.constexpr):
    """One pair. Y comes as the gradient of silu(gate) * up without the pair's weight, and is left as its value times the weight."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(W + row)
    dw = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < size
        dy = tl.load(Y + row * size + i, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(GU + row * 2 * size + i, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(GU + row * 2 * size + size + i, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        y = g * s * u
        dw += dy * y
        tl.store(DGU + row * 2 * size + i, (w * dy * u * s * (1.0 + g * (1.0 - s))).to(DGU.dtype.element_ty), mask=inside)
        tl.store(DGU + row * 2 * size + size + i, (w * dy * g * s).to(DGU.dtype.element_ty), mask=inside)
        tl.store(Y + row * size + i, (w * y).to(Y.dtype.element_ty), mask=inside)
    tl.store(DW + row, tl.sum(dw, 0))


@triton.jit
def _combine(
    H, Y, PLACE, W, OUT, size, K: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        pair = tl.load(PLACE + row * K + j).to(tl.int64)
        y = tl.load(Y + pair * size + i, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            y *= tl.load(W + row * K + j).to(tl.float32)
        total += y
    if ADD:
        total += tl.load(H + row * size + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * size + i, total.to(OUT.dtype.element_ty), mask=inside)
