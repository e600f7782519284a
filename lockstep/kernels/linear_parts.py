"""Linear layers by their tensors, with or without an adapter (LoRA), for the kernels of fast_layers.py.

With an adapter the result is W x + b + s B (A x), which is rounded where generation rounds it (generation/gpu/low_rank.py):
s A x at its own small scale, and the sum once. For that the layers of an input are products of [x, s A x] with [W, B]: only inside a
product is nothing rounded between. In a float32 residual stream the two are simply added.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class LinearParts(NamedTuple):
    """What a linear layer is made of: `weight` [out, in], `bias` [out], and the adapter's `down` (A) [r, in] and `up` (B) [out, r]."""

    weight: Tensor
    bias: Tensor | None
    down: Tensor | None
    up: Tensor | None
    scaling: float = 1.0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but the scaling."""
        return self[:4]


def parts_of(linear: Any) -> LinearParts | None:
    """The parts of a linear layer, plain or of peft; None where it is something else, or divided among ranks."""
    base = linear if type(linear) is nn.Linear or not hasattr(linear, "lora_A") else linear.get_base_layer()
    if type(base) is not nn.Linear or isinstance(base.weight, DTensor):
        return None
    if base is linear or linear.disable_adapters:
        return LinearParts(base.weight, base.bias, None, None)
    usual = linear.active_adapters == ["default"] and not linear.merged and not getattr(linear, "lora_variant", None)
    if not usual or not isinstance(linear.lora_dropout["default"], nn.Identity):
        return None
    down, up = linear.lora_A["default"], linear.lora_B["default"]
    return LinearParts(base.weight, base.bias, down.weight, up.weight, linear.scaling["default"]) if up.bias is None else None


def products(x: Tensor, layers: Sequence[LinearParts]) -> tuple[Tensor, list[Tensor | None]]:
    """The layers of x [N, in] side by side, as one product with all weights end to end, and s A x of each, which `gradients` needs. All
    adapters have the same scaling."""
    weight, bias = _joined([layer.weight for layer in layers]), _joined_bias(layers)
    adapted = [layer for layer in layers if layer.down is not None and layer.up is not None]
    if not adapted:
        return F.linear(x, weight, bias), [None] * len(layers)
    assert len({layer.scaling for layer in adapted}) == 1, "adapters of one model have one scaling"
    downs = [layer.down for layer in adapted if layer.down is not None]
    room, size = aligned(sum(map(len, downs))), x.shape[1]
    down = x.new_zeros(room, size)
    torch.cat(downs, out=down[: sum(map(len, downs))])
    wide_x, wide = torch.cat([x, _scaled(x, down.t(), adapted[0].scaling)], 1), x.new_zeros(len(weight), size + room)
    wide[:, :size] = weight
    small: list[Tensor | None] = []
    row, place = 0, size
    for layer in layers:
        rows = slice(row, row := row + len(layer.weight))
        if layer.down is None or layer.up is None:
            small.append(None)
            continue
        columns = slice(place, place := place + len(layer.down))
        wide[rows, columns] = layer.up
        small.append(wide_x[:, columns].contiguous())
    return F.linear(wide_x, wide, bias), small


def added_product(h: Tensor, x: Tensor, layer: LinearParts) -> tuple[Tensor, Tensor | None]:
    """h (float32) + the layer of x, for a layer without a bias; and s A x."""
    out = added(h, x, layer.weight)
    if layer.down is None or layer.up is None:
        return out, None
    small = _scaled(x, layer.down.t(), layer.scaling)
    return added(out, small, layer.up, out=out), small


def gradients(
    grad: Tensor,
    x: Tensor,
    small: Sequence[Tensor | None],
    layers: Sequence[LinearParts],
    needs: Sequence[bool],
    needs_x: bool = True,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(gradient of x; gradients of the `tensors` of each layer in turn, those that `needs` asks for), where `grad` is that of the layers
    side by side and `small` has their s A x."""
    sizes = [len(layer.weight) for layer in layers]
    dx = grad @ _joined([layer.weight for layer in layers]) if needs_x else None
    of_weights = (grad.t() @ x).split(sizes) if any(needs[::4]) else ()
    of_biases = grad.sum(0).split(sizes) if any(needs[1::4]) else ()
    out: list[Tensor | None] = []
    place = 0
    for number, layer in enumerate(layers):
        weight, bias, down, up = needs[4 * number : 4 * number + 4]
        out += [of_weights[number] if weight else None, of_biases[number] if bias else None]
        start, place = place, place + sizes[number]
        own_small = small[number]
        if layer.down is None or layer.up is None or own_small is None:
            out += [None, None]
            continue
        own = grad[:, start:place]
        inner = _scaled(own, layer.up, layer.scaling)
        if dx is not None:
            dx.addmm_(inner, layer.down)
        out += [inner.t() @ x if down else None, own.t() @ own_small if up else None]
    return dx, out


def _joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def _joined_bias(layers: Sequence[LinearParts]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    return _joined([layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers])


def added(h: Tensor, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """h (float32) + x @ weight^T, not rounded; in `out`, which may be h, where it is given."""
    if x.dtype == h.dtype:
        return torch.addmm(h, x, weight.t(), out=out)
    if out is None:
        return torch.addmm(h, x, weight.t(), out_dtype=h.dtype)
    return torch.addmm(h, x, weight.t(), out_dtype=h.dtype, out=out)


def aligned(columns: int) -> int:
    """So many or a few more: products want rows of a multiple of 16 bytes."""
    return -(-columns // 8) * 8


def _scaled(a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """scaling * a @ b, rounded once."""
    return torch.addmm(a.new_empty(1), a, b, beta=0, alpha=scaling)
