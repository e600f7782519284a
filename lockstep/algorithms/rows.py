"""Rows: how tokens that lie end to end divide into rows.

Every column per token is flat here, [M], for B rows without padding; what belongs to a row is [B]. `Rows` goes from one to the other.
A padded block [B, T] is B rows of T tokens, some of them outside the mask: `Rows.of_padded` and `flatten` read it as it lies.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class Rows:
    """B rows of `lengths` [B] (int64, on the CPU), M tokens in all, for columns on `device`."""

    def __init__(self, lengths: Tensor, device: torch.device | str = "cpu") -> None:
        self.lengths = lengths
        self.device = torch.device(device)

    @classmethod
    def of_padded(cls, block: Tensor) -> Rows:
        """The rows of a block [B, T], each of all T tokens; the block's tokens are `block.flatten()`."""
        return cls(torch.full((block.shape[0],), block.shape[1]), block.device)

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        """M."""
        return int(self.lengths.sum())

    @cached_property
    def index(self) -> Tensor:
        """[M] int64: the row of each token."""
        return torch.repeat_interleave(self.lengths).to(self.device, non_blocking=True)

    @cached_property
    def positions(self) -> Tensor:
        """[M] int64: the place of each token in its row."""
        starts = torch.cumsum(self.lengths, 0) - self.lengths
        places = torch.arange(self.num_tokens) - torch.repeat_interleave(starts, self.lengths)
        return places.to(self.device, non_blocking=True)

    def spread(self, x: Tensor) -> Tensor:
        """x [B] at every token of its row: [M]."""
        return x[self.index]

    def sum(self, x: Tensor) -> Tensor:
        """Sums [B] of x [M] over each row, in the type of x. A row's sum does not depend on the rows beside it."""
        total = torch.segment_reduce(x.double(), "sum", lengths=self._lengths_there, axis=0, unsafe=True)
        return total if x.dtype == torch.float64 else total.to(x.dtype if x.is_floating_point() else torch.int64)

    def mean(self, x: Tensor, mask: Tensor) -> Tensor:
        """Means [B] of x [M] over the tokens of each row that the mask [M] selects; 0 where it selects none."""
        return self.sum(torch.where(mask.bool(), x, 0)) / self.sum(mask.bool()).clamp(min=1)

    def pad(self, x: Tensor) -> Tensor:
        """x [M] as a block [B, T], T the longest row, with zeros behind the shorter ones. For a user's function that wants blocks."""
        width = int(self.lengths.max()) if len(self) else 0
        block = x.new_zeros(len(self) * width)
        return block.index_copy(0, self.index * width + self.positions, x).view(len(self), width)

    def unpad(self, block: Tensor) -> Tensor:
        """The tokens [M] of what `pad` made."""
        return block[self.index, self.positions]

    @cached_property
    def _lengths_there(self) -> Tensor:
        return self.lengths.to(self.device, non_blocking=True)
