"""Copies of linear layers' weights that are laid out for decoding, for the time of one generation.

A matrix product with few rows spends much of its time on rearranging the weight. Decoding makes thousands of them with the same weight, so
it is rearranged once: into the panels of `linear.c` (PackedLinear), or for every other model into oneDNN's layout (`prepacked`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.workers.rollout.native.cpu.kernels import Library

_STORE, _ADD, _GATED = range(3)

_SMALLEST = 128 * 128
"""Weights with fewer numbers are left alone: the call costs more than it saves."""
_TYPICAL_ROWS = 64
"""The number of rows that the layout is chosen for; it serves any number."""
_MOST_ROWS = 128
"""With more rows the plain product is as fast."""


class PackedLinear:
    """x -> x W^T + bias, in float32, where W is the weights of `layers` one below the other; weights in float32 or bfloat16.

    With `gated`, for two layers of the same size: x -> silu(first(x)) * second(x). A row's result has the same bits in any batch.
    """

    def __init__(self, library: Library, layers: Sequence[nn.Linear], gated: bool = False) -> None:
        weights = [layer.weight.detach() for layer in layers]
        assert all(weight.dtype == weights[0].dtype and weight.dtype in (torch.float32, torch.bfloat16) for weight in weights)
        self._library, self._gated, self._half = library, gated, weights[0].dtype == torch.bfloat16
        self.columns = len(weights[0]) if gated else sum(map(len, weights))
        # [panels, 2 halves, lanes, inputs]
        halves = _halves(weights, library.panel // 2, gated)
        # In bfloat16 the two halves are the two halves of a 32-bit word.
        self._panels = (halves.permute(0, 3, 2, 1) if self._half else halves.permute(0, 3, 1, 2)).contiguous()
        self._bias = None
        if any(layer.bias is not None for layer in layers):
            biases = [
                (torch.zeros(len(w)) if (b := layer.bias) is None else b.detach().float())
                for layer, w in zip(layers, weights, strict=True)
            ]
            self._bias = _halves([bias[:, None] for bias in biases], library.panel // 2, gated).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, inputs] float32 -> [N, columns]."""
        return self._into(x, torch.empty(len(x), self.columns), _GATED if self._gated else _STORE)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out [N, columns] += this layer of x [N, inputs]."""
        assert not self._gated
        self._into(x, out, _ADD)

    def _into(self, x: Tensor, out: Tensor, mode: int) -> Tensor:
        assert x.dtype == out.dtype == torch.float32
        assert x.stride(1) == out.stride(1) == 1
        rows, depth = x.shape
        sizes = (x.stride(0), out.stride(0), rows, depth, self.columns, int(self._half), mode)
        self._library.call("linear", x, self._panels, self._bias, out, *sizes)
        return out


def _halves(weights: Sequence[Tensor], lanes: int, gated: bool) -> Tensor:
    """[panels, 2, lanes, inputs]: neighbouring columns, or (gated) columns of the one weight and of the other; zeros at the end."""
    if gated:
        first, second = (F.pad(weight, (0, 0, 0, -len(weight) % lanes)).view(-1, lanes, weight.shape[1]) for weight in weights)
        return torch.stack([first, second], 1)
    whole = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    return F.pad(whole, (0, 0, 0, -len(whole) % (2 * lanes))).view(-1, 2, lanes, whole.shape[1])


@contextmanager
def prepacked(module: nn.Module) -> Iterator[int]:
    """Inside, the linear layers of a CPU module use prepacked copies of their weights; gives the bytes of these copies.

    Weights that change inside are not seen. Layers of another class than nn.Linear, of another type than float32 or bfloat16, and modules
    on another device are left as they are.
    """
    linears = [layer for layer in module.modules() if type(layer) is nn.Linear and _can_be_packed(layer.weight)]
    layers = linears if torch.backends.mkldnn.is_available() else []
    packed: dict[int, Tensor] = {}
    for layer in layers:
        if id(layer.weight) not in packed:
            packed[id(layer.weight)] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _TYPICAL_ROWS)
        # An attribute of the instance hides the class's forward, and goes away without a trace.
        layer.forward = partial(_linear, layer, packed[id(layer.weight)])  # type: ignore[method-assign]
    try:
        yield sum(layer.weight.nbytes for layer in {id(layer.weight): layer for layer in layers}.values())
    finally:
        for layer in layers:
            del layer.forward


def _can_be_packed(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and weight.numel() >= _SMALLEST


def _linear(layer: nn.Linear, packed: Tensor, x: Tensor) -> Tensor:
    if x.numel() > _MOST_ROWS * x.shape[-1]:
        return nn.functional.linear(x, layer.weight, layer.bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, layer.bias, "none", [], "")
