"""Linear layers by their tensors, with or without an adapter (LoRA), for the kernels of fast_layers.py.

With an adapter the result is W x + b + s B (A x), which is rounded where generation rounds it (workers/rollout/native/gpu/low_rank.py):
s A x at its own small scale, and the sum once. For that the layers of an input are products of [x, s A x] with [W, B]: only inside a
product is nothing rounded between. In a float32 residual stream the two are simply added.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Parts(NamedTuple):
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


def parts_of(linear: Any) -> Parts | None:
    """The parts of a linear layer, plain or of peft; None where it is something else, or divided among ranks."""
    base = linear.get_base_layer() if hasattr(linear, "lora_A") else linear
    if type(base) is not nn.Linear or isinstance(base.weight, DTensor):
        return None
    if base is linear or linear.disable_adapters:
        return Parts(base.weight, base.bias, None, None)
    usual = linear.active_adapters == ["default"] and not linear.merged and not getattr(linear, "lora_variant", None)
    if not usual or not isinstance(linear.lora_dropout["default"], nn.Identity):
        return None
    down, up = linear.lora_A["default"], linear.lora_B["default"]
    return Parts(base.weight, base.bias, down.weight, up.weight, linear.scaling["default"]) if up.bias is None else None


def products(x: Tensor, layers: Sequence[Parts]) -> tuple[list[Tensor], list[Tensor | None]]:
    """The layers of x [N, in], and s A x of each, which `gradients` needs. All adapters have the same scaling.

    Without adapters they are one product, and the layers neighbouring columns of it.
    """
    adapted = [layer for layer in layers if layer.down is not None and layer.up is not None]
    if not adapted:
        biases = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers)), "some of these layers have a bias"
        made = F.linear(x, _end_to_end([layer.weight for layer in layers]), _end_to_end(biases) if biases else None)
        return list(made.split([len(layer.weight) for layer in layers], 1)), [None] * len(layers)
    assert len({layer.scaling for layer in adapted}) == 1, "adapters of one model have one scaling"
    downs = [layer.down for layer in adapted if layer.down is not None]
    room, size = aligned(sum(map(len, downs))), x.shape[1]
    down = x.new_zeros(room, size)
    torch.cat(downs, out=down[: sum(map(len, downs))])
    wide = torch.cat([x, _scaled(x, down.t(), adapted[0].scaling)], 1)
    found: list[Tensor] = []
    small: list[Tensor | None] = []
    place = size
    for layer in layers:
        if layer.down is None or layer.up is None:
            found.append(F.linear(x, layer.weight, layer.bias))
            small.append(None)
            continue
        end = place + len(layer.down)
        weight = x.new_empty(len(layer.weight), size + room)
        weight[:, :size], weight[:, size:], weight[:, place:end] = layer.weight, 0, layer.up
        found.append(F.linear(wide, weight, layer.bias))
        small.append(wide[:, place:end].contiguous())
        place = end
    return found, small


def added_product(h: Tensor, x: Tensor, layer: Parts) -> tuple[Tensor, Tensor | None]:
    """h (float32) + the layer of x, for a layer without a bias; and s A x."""
    out = added(h, x, layer.weight)
    if layer.down is None or layer.up is None:
        return out, None
    small = _scaled(x, layer.down.t(), layer.scaling)
    return added(out, small, layer.up, out=out), small


def gradients(
    grad: Tensor, x: Tensor, small: Tensor | None, layer: Parts, needs: tuple[bool, ...], dx: Tensor | None, needs_x: bool = True
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(gradient of x, added to `dx` in place where there is one; gradients of `layer.tensors` that `needs` asks for).

    `small` is s A x.
    """
    if needs_x:
        dx = grad @ layer.weight if dx is None else dx.addmm_(grad, layer.weight)
    weight, bias, down, up = needs
    out = [grad.t() @ x if weight else None, grad.sum(0) if bias else None, None, None]
    if layer.down is not None and layer.up is not None and small is not None:
        inner = _scaled(grad, layer.up, layer.scaling)
        if dx is not None and needs_x:
            dx.addmm_(inner, layer.down)
        out[2:] = [inner.t() @ x if down else None, grad.t() @ small if up else None]
    return dx, out


def gradients_of_all(
    grad: Tensor, x: Tensor, small: Sequence[Tensor | None], layers: Sequence[Parts], needs: Sequence[bool], needs_x: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """`gradients` of several layers of x, whose own lie side by side in `grad` [N, all out]: of x, and of their tensors in a row."""
    sizes = [len(layer.weight) for layer in layers]
    dx: Tensor | None = None
    out: list[Tensor | None] = []
    if any(layer.down is not None for layer in layers):
        for number, (layer, part) in enumerate(zip(layers, grad.split(sizes, 1), strict=True)):
            dx, made = gradients(part, x, small[number], layer, tuple(needs[4 * number : 4 * number + 4]), dx, needs_x)
            out += made
        return dx, out
    if needs_x:
        dx = grad @ _end_to_end([layer.weight for layer in layers])
    weights = (grad.t() @ x).split(sizes) if any(needs[::4]) else ()
    biases = grad.sum(0).split(sizes) if any(needs[1::4]) else ()
    for number in range(len(layers)):
        of_weight, of_bias = needs[4 * number : 4 * number + 2]
        out += [weights[number] if of_weight else None, biases[number] if of_bias else None, None, None]
    return dx, out


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


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
