"""A vocabulary that is divided among ranks: which part one has, and what they exchange. Legend: M tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of an output layer that one rank of `group` has."""

    group: dist.ProcessGroup
    start: int
    """The token of the first row."""
    size: int
    """How many of the rows are tokens; those after them are padding."""
    most: int
    """The most rows that a rank of the group has: all of them cut the tokens into the same chunks."""
    sums_hidden_grad: bool = False
    """Whether every rank gets the whole gradient of the hidden states, as against what its part adds to it."""

    @classmethod
    def of(cls, weight: DTensor, *, sums_hidden_grad: bool = False) -> VocabularyPart:
        """This rank's part of an output layer that is split by rows over the ranks of a mesh."""
        mesh = weight.device_mesh
        _, (start, *_) = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
        return cls(mesh.get_group(), start, len(weight.to_local()), -(-weight.shape[0] // mesh.size()), sums_hidden_grad)

    def log_normaliser(self, logits: Tensor) -> Tensor:
        """logsumexp [M] over the logits of all ranks."""
        own = torch.logsumexp(logits, dim=-1)
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(parts, own, group=self.group)
        return torch.logsumexp(torch.stack(parts), dim=0)

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each target [M] here (0 where another rank has it), and whether it is here."""
        here = (targets >= self.start) & (targets < self.start + self.size)
        return torch.where(here, targets - self.start, 0), here
