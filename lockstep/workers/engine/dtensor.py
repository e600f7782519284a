"""Parameters that may be DTensors, of whatever engine: what this rank has of one, the whole of it, filling it, and the gradient's norm."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

ReadRows = Callable[[str, int, int], Tensor]
"""(name, start, stop) -> these rows of a weight."""


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, without a gradient, gathered along one dimension of the ranks after the other: asked for several at once, torch
    does the same and warns. As it is, not a copy, where this rank has all of it. A collective."""
    placements = list(tensor.placements) if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1 else []
    for dim in range(len(placements)):
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)  # type: ignore[attr-defined]
    return local_part(tensor).detach()


@torch.no_grad()
def read_shards(parameters: Iterable[tuple[str, Tensor]], read: ReadRows) -> None:
    """Fill named parameters: each rank reads the rows of its shards, and keeps its columns of them."""
    for name, parameter in parameters:
        local = local_part(parameter)
        offset = [0, 0]
        if local.numel():
            if isinstance(parameter, DTensor):
                offset[:] = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)[1]
            rows = read(name, offset[0], offset[0] + len(local))
            local.copy_(rows if local.dim() < 2 else rows[:, offset[1] : offset[1] + local.shape[1]])


def clip_grad_norm(
    gradients: Iterable[Tensor], max_norm: float, counted: Iterable[Tensor] | None = None, group: dist.ProcessGroup | None = None
) -> float:
    """Scale `gradients` down to `max_norm`; returns their norm before: that of `counted` (all of them unless it is given), together
    with those of the other ranks of `group`.

    Tensors may be split along different dimensions of the ranks. torch's own function does not mix them, and stops half-way, with some
    of them scaled.
    """
    gradients = list(gradients)
    parts: dict[tuple[tuple[DeviceMesh, int], ...], list[Tensor]] = {}
    for tensor in gradients if counted is None else counted:
        split: tuple[tuple[DeviceMesh, int], ...] = ()
        if isinstance(tensor, DTensor):
            split = tuple((tensor.device_mesh, dim) for dim, where in enumerate(tensor.placements) if not where.is_replicate())
        parts.setdefault(split, []).append(local_part(tensor))
    norms = {split: torch._foreach_norm(tensors, 2, dtype=torch.float32) for split, tensors in parts.items()}
    squares = {split: torch.stack(found).square().sum() for split, found in norms.items()}
    for split, square in squares.items():
        for mesh, dim in split:
            dist.all_reduce(square, group=mesh.get_group(dim))
    total = torch.stack(list(squares.values())).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([local_part(gradient) for gradient in gradients], scale)
    return float(norm)
