"""Copies of linear layers' weights in oneDNN's layout for products with few rows, for the time of one generation (see linears.py)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.models.lora import AdaptedLinear

_SMALLEST = 128 * 128
"""Weights with fewer numbers are left alone: the call costs more than it saves."""
_TYPICAL_ROWS = 64
"""The number of rows that the layout is chosen for; it serves any number."""
_MOST_ROWS = 128
"""With more rows the plain product is as fast."""


@contextmanager
def prepacked(module: nn.Module) -> Iterator[int]:
    """Inside, the linear layers of a CPU module use prepacked copies of their weights; gives the bytes of these copies.

    Weights that change inside are not seen. Layers of other classes than nn.Linear and AdaptedLinear, of other types
    than float32 and bfloat16, and modules on another device are left as they are.
    """
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and _can_be_packed(layer)]
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


def _can_be_packed(layer: nn.Linear) -> bool:
    if type(layer) not in (nn.Linear, AdaptedLinear):
        return False
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and weight.numel() >= _SMALLEST


def _linear(layer: nn.Linear, packed: Tensor, x: Tensor) -> Tensor:
    if x.numel() > _MOST_ROWS * x.shape[-1]:
        out = nn.functional.linear(x, layer.weight, layer.bias)
    else:
        out = torch.ops.mkldnn._linear_pointwise(x, packed, layer.bias, "none", [], "")
    return out + layer.delta(x) if isinstance(layer, AdaptedLinear) else out
