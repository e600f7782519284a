"""HostFile: the bytes of a file of tensors in host memory that another process can write to the disk."""

import mmap
import os
import weakref

import torch
from torch import Tensor

from lockstep.models.weight_files import layout
from lockstep.workers.engine.checkpoint import Specs


class HostFile:
    """Filled by `put`, written by whoever maps `memory`. Of a GPU's tensors the memory is pinned, which is faster.

    Making it takes six times as long as filling it, so it is kept from save to save.
    """

    def __init__(self, specs: Specs, device: torch.device) -> None:
        self.specs = dict(specs)
        start, self.places, self.size = layout(specs)
        self.memory = os.memfd_create("checkpoint")
        weakref.finalize(self, os.close, self.memory)
        os.ftruncate(self.memory, self.size)
        self._bytes = torch.frombuffer(mmap.mmap(self.memory, self.size, flags=mmap.MAP_SHARED), dtype=torch.uint8)
        self._bytes[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        if device.type == "cuda":
            cudart = torch.cuda.cudart()
            # Memory that the system does not let us pin works too; it is slower.
            if int(cudart.cudaHostRegister(self._bytes.data_ptr(), self.size, 0)) == 0:
                weakref.finalize(self, cudart.cudaHostUnregister, self._bytes.data_ptr()).atexit = False

    def put(self, place: int, tensor: Tensor) -> None:
        """Begin to copy a tensor to its place. One of a GPU is there when the device has been waited for."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._bytes[place : place + len(data)].copy_(data, non_blocking=True)
