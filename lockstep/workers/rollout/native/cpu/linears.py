"""PackedLinear: copies of linear layers' weights in the panels of `linear.c`, for the time of one generation.

A matrix product with few rows spends much of its time on rearranging the weight. Decoding makes thousands of them with the same weight, so
it is rearranged once; prepacked.py does it for models that the C functions do not compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.adapted import AdaptedLinear
from lockstep.workers.rollout.native.cpu.kernels import Library

_STORE, _ADD, _GATED = range(3)


class _Matrix(NamedTuple):
    """A linear layer that is no module."""

    weight: Tensor
    bias: Tensor | None = None


class PackedLinear:
    """x -> x W^T + bias, in float32, where W is the weights of `layers` one below the other; weights in float32 or bfloat16.

    With `gated`, for two layers of the same size: x -> silu(first(x)) * second(x). A row's result has the same bits in any batch.
    """

    def __init__(self, library: Library, layers: Sequence[nn.Linear | _Matrix], gated: bool = False) -> None:
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


class AdaptedPacked:
    """PackedLinear of layers of which some have adapters: x -> x (W + s B A)^T + bias, the adapters as they are beside the weights.

    Adapters are packed in float32 whatever the weights are: they are small, and s is multiplied into B without rounding.
    """

    def __init__(self, library: Library, layers: Sequence[nn.Linear], gated: bool = False) -> None:
        self._base, self._gated = PackedLinear(library, layers), gated
        adapted = [layer for layer in layers if isinstance(layer, AdaptedLinear)]
        self._down = PackedLinear(library, [_Matrix(layer.lora_A.detach().float()) for layer in adapted])
        self._ups: list[tuple[slice, slice, PackedLinear]] = []
        column = place = 0
        for layer in layers:
            if isinstance(layer, AdaptedLinear):
                up = PackedLinear(library, [_Matrix(layer.lora_B.detach().float() * layer.scaling)])
                rank = len(layer.lora_A)
                self._ups.append((slice(column, column + layer.out_features), slice(place, place + rank), up))
                place += rank
            column += layer.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """As PackedLinear."""
        out = self._base(x)
        self._add_adapters(out, x)
        if self._gated:
            first, second = out.chunk(2, dim=1)
            out = F.silu(first) * second
        return out

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """As PackedLinear."""
        self._base.add_to(out, x)
        self._add_adapters(out, x)

    def _add_adapters(self, out: Tensor, x: Tensor) -> None:
        down = self._down(x)
        for columns, part, up in self._ups:
            up.add_to(out[:, columns], down[:, part])


def pack(library: Library, layers: Sequence[nn.Linear], gated: bool = False) -> PackedLinear | AdaptedPacked:
    """The layers of one input, packed."""
    kind = AdaptedPacked if any(isinstance(layer, AdaptedLinear) for layer in layers) else PackedLinear
    return kind(library, layers, gated)


def _halves(weights: Sequence[Tensor], lanes: int, gated: bool) -> Tensor:
    """[panels, 2, lanes, inputs]: neighbouring columns, or (gated) columns of the one weight and of the other; zeros at the end."""
    if gated:
        first, second = (F.pad(weight, (0, 0, 0, -len(weight) % lanes)).view(-1, lanes, weight.shape[1]) for weight in weights)
        return torch.stack([first, second], 1)
    whole = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    return F.pad(whole, (0, 0, 0, -len(whole) % (2 * lanes))).view(-1, 2, lanes, whole.shape[1])
