"""PackedMemory: memory for weights that are laid out anew for each generation."""

import torch
from torch import Tensor

from lockstep.workers.rollout.native.cpu.kernels import Library

_BLOCK = 1 << 26
"""Bytes asked for at once. What is not used of them takes no memory."""
_LINE = 64
"""Tensors begin where a line of the processor's cache does."""


class PackedMemory:
    """Tensors side by side in a few large blocks, in large pages where the system has them: 4 kB pages of one weight cost a product with
    few rows up to a tenth of its time. After `reuse` the blocks are given out again: fresh memory costs more than laying weights out."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._blocks: list[Tensor] = []
        self.reuse()

    def reuse(self) -> None:
        """Nobody needs the tensors any more that were taken until now."""
        self._number, self._used = 0, 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape; what is in it is left to chance."""
        count = torch.Size(shape).numel() * dtype.itemsize
        while self._number < len(self._blocks) and len(self._blocks[self._number]) - self._used < count:
            self._number, self._used = self._number + 1, 0
        if self._number == len(self._blocks):
            self._blocks.append(torch.empty(max(_BLOCK, count), dtype=torch.uint8))
            self._library.call("large_pages", self._blocks[-1], len(self._blocks[-1]))
        taken = self._blocks[self._number][self._used : self._used + count]
        self._used += -(-count // _LINE) * _LINE
        return taken.view(dtype).view(shape)
