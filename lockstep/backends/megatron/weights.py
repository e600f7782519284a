"""Whole Hugging Face tensors from the parts of all ranks, and each rank's parts from them."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.backends.megatron.convert import Placed, Read, Shapes
from lockstep.backends.megatron.layout import MegatronLayout

Get = Callable[[nn.Parameter], Tensor]
"""What is to be exported of a parameter: itself, its master weight, a moment."""


class MegatronWeights:
    """The parameters of the model of which this rank has a part, by Hugging Face name. Only `read_into` is not for all ranks together."""

    def __init__(
        self, stage: nn.Module, placed: Sequence[Placed], shapes: Shapes, layout: MegatronLayout, device: torch.device
    ) -> None:
        self._placed = placed
        self._shapes = shapes
        self._layout = layout
        self._device = device
        own = dict(stage.named_parameters())
        self._parameters = {entry: own.pop(entry.parameter) for entry in placed if entry.stage == layout.pipeline.rank()}
        assert not own, f"parameters that nothing fills: {sorted(own)}"
        for entry, parameter in self._parameters.items():
            # What megatron's gradient norm asks, so that it counts a weight that every rank has once.
            divided = entry.piece.divided_along
            parameter.tensor_model_parallel = divided is not None  # type: ignore[attr-defined]
            parameter.partition_dim = -1 if divided is None else divided  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]

    def read_into(self, read: Read, put: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Give each parameter of this rank its part of what `read` reads; this rank reads nothing else."""
        tensor = self._layout.tensor
        for entry, parameter in self._parameters.items():
            put(parameter, entry.piece.take(read, tensor.rank(), tensor.size()).to(self._device))

    def export(self, get: Get, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) on every rank, one of megatron's parameters at a time. `dtype` is what `get` gives."""
        for entry in self._placed:
            if entry.is_copy:
                continue
            names = entry.piece.names
            if entry in self._parameters:
                tensors = entry.piece.join(self._all_parts(get(self._parameters[entry]), entry))
            else:
                tensors = [torch.empty(self._shapes[name], dtype=dtype, device=self._device) for name in names]
            for name, tensor in zip(names, tensors, strict=True):
                yield name, self._layout.from_stage(tensor, entry.stage)

    def _all_parts(self, part: Tensor, entry: Placed) -> list[Tensor]:
        group = self._layout.tensor
        if entry.piece.divided_along is None or group.size() == 1:
            return [part.detach()]
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.detach().contiguous(), group=group)
        return parts
