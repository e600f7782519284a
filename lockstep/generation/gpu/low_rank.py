"""Linear layers of one input with adapters beside them (LoRA), as one product: [W, B] [x, s A x], with room for s A x behind x.

So a step has one small product more than without adapters, for all layers of an input together, and rounds where training rounds
(kernels/linear_parts.py): s A x, and the sum once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.linear_parts import aligned
from lockstep.models.lora import AdaptedLinear

_LAYOUT = "laid_out"
"""The attribute of the first layer that has what `lay_out` made."""


def lay_out(linears: Sequence[Any]) -> None:
    """Put the weights of these layers and their adapters' B into one tensor, A into another; the parameters become views of them.

    Where a layer has no adapter, or the adapter of another layer is meant, there are zeros.
    """
    if _found(linears) is not None:
        return
    ranks = [_rank(linear) for linear in linears]
    size = linears[0].in_features
    first = linears[0].weight
    room = aligned(sum(ranks))
    whole = first.new_zeros(sum(linear.out_features for linear in linears), size + room)
    downs = first.new_zeros(room, size)
    row = column = 0
    for linear, rank in zip(linears, ranks, strict=True):
        rows = slice(row, row + linear.out_features)
        columns = slice(column, column + rank)
        _move(linear.weight, whole[rows, :size])
        if rank:
            _move(linear.lora_B, whole[rows, size:][:, columns])
            _move(linear.lora_A, downs[columns])
        row = rows.stop
        column = columns.stop
    setattr(linears[0], _LAYOUT, (whole, downs))


def room_for(linears: Sequence[Any]) -> int:
    """Columns behind x that `joint` fills."""
    found = _found(linears)
    return 0 if found is None else len(found[1])


def joint(x: Tensor, linears: Sequence[Any]) -> Tensor:
    """[outputs of all, inputs + room]: what x [N, inputs + room] is to be multiplied with, after the room in it is filled here."""
    found = _found(linears)
    assert found is not None, "these layers are not laid out"
    whole, downs = found
    size = linears[0].in_features
    behind = x[:, size:]
    scaling = next(linear.scaling for linear in linears if _rank(linear))
    torch.addmm(behind, x[:, :size], downs.t(), beta=0, alpha=scaling, out=behind)
    return whole


def _found(linears: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """What `lay_out` made of these layers, as long as their parameters are in it."""
    layout: tuple[Tensor, Tensor] | None = getattr(linears[0], _LAYOUT, None)
    if layout is None:
        return None
    whole, downs = (tensor.untyped_storage().data_ptr() for tensor in layout)
    in_place = all(linear.weight.untyped_storage().data_ptr() == whole for linear in linears) and all(
        linear.lora_A.untyped_storage().data_ptr() == downs and linear.lora_B.untyped_storage().data_ptr() == whole
        for linear in linears
        if _rank(linear)
    )
    return layout if in_place else None


def _rank(linear: Any) -> int:
    return len(linear.lora_A) if isinstance(linear, AdaptedLinear) else 0


def _move(parameter: Any, place: Tensor) -> None:
    place.copy_(parameter.data)
    parameter.data = place
