"""The C functions of the native CPU engine called one by one from Python: the reference of what `decoder_layers` does in one call, and what
rollout_cpu_parts.py times. The engine itself never does this."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.generation.cpu.fused_backend import Last
from lockstep.generation.cpu.kernels import Library, Pages
from lockstep.generation.cpu.linears import ADD, GATED, PAIRS, STORE, PackedLinear
from lockstep.generation.cpu.paged_attention import StepBatch, attend, store


def rms_norm(library: Library, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension of x [N, size]."""
    assert x.dtype == weight.dtype == torch.float32
    assert x.is_contiguous()
    out = torch.empty_like(x)
    library.call("rms_norm", x, weight, out, *x.shape, eps)
    return out


def rotate(
    library: Library,
    qk: Tensor,
    num_queries: int,
    angles: tuple[Tensor, Tensor],
    positions: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
) -> None:
    """Turn the heads qk [N, heads, D] by their positions [N] int64, in place; `angles` are cos and sin [positions, D / 2].

    `norms` are the weights of the norms that come before it, of the first `num_queries` heads and of the others.
    """
    tokens, heads, dim = qk.shape
    assert qk[0].is_contiguous()
    library.call("rotate", qk, *angles, positions, *norms, qk.stride(0), tokens, heads, num_queries, dim, eps)


def multiply(library: Library, packed: PackedLinear, x: Tensor, out: Tensor | None = None) -> Tensor:
    """The layer of x [N, inputs] float32: [N, columns]; added to `out` where that is given."""
    mode = GATED if packed.gated else STORE if out is None else ADD
    out = torch.empty(len(x), packed.columns) if out is None else out
    assert x.dtype == out.dtype == torch.float32
    assert x.stride(1) == out.stride(1) == 1
    if packed.kind == PAIRS:
        x = x.bfloat16().contiguous()
    panels, bias, *shape = packed.row(mode)
    library.call("linear", x, panels, bias, out, x.stride(0), out.stride(0), len(x), *shape, 0)
    return out


class OneByOne:
    """WholePass as calls of single functions."""

    calls = 0

    def __init__(
        self, library: Library, layers: list[Any], last: Last, pages: list[Pages], sizes: tuple[int, int, int], eps: float
    ) -> None:
        self.library, self.layers, (self.norm, self.head) = library, layers, last
        self.pages, self.sizes, self.eps = pages, sizes, eps

    def __call__(self, hidden: Tensor, angles: tuple[Tensor, Tensor], batch: StepBatch, blocks: Tensor, wanted: Tensor) -> Tensor:
        (heads, kv_heads, dim), lib = self.sizes, self.library
        OneByOne.calls += 1
        for layer, pages in zip(self.layers, self.pages, strict=True):
            qkv = multiply(lib, layer.qkv, rms_norm(lib, hidden, layer.input_norm, self.eps)).view(len(hidden), -1, dim)
            rotate(lib, qkv[:, : heads + kv_heads], heads, angles, batch.positions, layer.norms, self.eps)
            query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
            store(lib, key, value, batch.slots, pages)
            seen = attend(lib, query, pages, batch.page_table, blocks, layer.variant)
            multiply(lib, layer.out, seen.flatten(1), hidden)
            gated = multiply(lib, layer.gate_up, rms_norm(lib, hidden, layer.mlp_norm, self.eps))
            multiply(lib, layer.down, gated, hidden)
        return multiply(lib, self.head, rms_norm(lib, hidden[wanted], self.norm, self.eps))
