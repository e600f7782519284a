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
    few rows up to a tenth of its time. A block is there as long as one of its tensors is."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape; what is in it is left to chance."""
        count = torch.Size(shape).numel() * dtype.itemsize
        if len(self._left) < count:
            self._left = torch.empty(max(_BLOCK, count) + _LINE, dtype=torch.uint8)
            self._library.call("large_pages", self._left, len(self._left))
        taken, self._left = self._left[:count], self._left[-(-count // _LINE) * _LINE :]
        return taken.view(dtype).view(shape)
