"""ipc: to other processes of this machine, without a file. The offer names memory; receivers map it.

On the CPU it is one block of anonymous shared memory (memfd): it has no name that could be left behind, no limit of /dev/shm, and is gone
when the last process that has it ends. Between processes that use the same GPU, `cuda=True` sends CUDA handles instead: tensors stay where
they are, and the sender keeps them until it is closed.
"""

import math
import mmap
import os
import pickle
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import WeightSyncError
from lockstep.workers.weight_sync.base import Manifest, Stream, TensorInfo, WeightOffer, Weights, WeightSender, as_bytes, describe

_ALIGNMENT = 64


@dataclass(frozen=True)
class MemoryOffer(WeightOffer):
    """Tensors one after the other in the memory behind `path`."""

    version: int
    manifest: Manifest
    offsets: dict[str, int]
    path: str
    size: int

    def open(self, device: torch.device, receiver: int) -> Stream:
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found != self.size:
                    raise WeightSyncError(f"the shared memory of version {self.version} has {found} bytes, {self.size} were sent")
                # A private mapping: torch wants memory that it may write to, and nobody else shall see it if it does.
                memory = torch.frombuffer(mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        except OSError as error:
            raise WeightSyncError(
                f"the shared memory {self.path} of version {self.version} cannot be opened ({error}): its sender is gone, or on another "
                "machine; there actor_rollout_ref.rollout.weight_sync=broadcast or disk works"
            ) from error
        return [(name, info, _slice(memory, self.offsets[name], info)) for name, info in self.manifest.items()]


@dataclass(frozen=True)
class CudaOffer(WeightOffer):
    """Tensors in the memory of a GPU that both processes see under the same number."""

    version: int
    manifest: Manifest
    handles: bytes

    def open(self, device: torch.device, receiver: int) -> Stream:
        try:
            rebuilt = {name: rebuild(*arguments) for name, (rebuild, arguments) in pickle.loads(self.handles).items()}
        except RuntimeError as error:
            raise WeightSyncError(
                f"the GPU memory of version {self.version} cannot be opened ({error}): its sender is gone, or on another GPU; there "
                "actor_rollout_ref.rollout.weight_sync=disk works"
            ) from error
        return [(name, info, rebuilt[name]) for name, info in self.manifest.items()]


class IPCSender(WeightSender):
    """Puts the weights into shared memory; with `cuda`, makes handles of tensors on the GPU. Raises WeightSyncError outside Linux."""

    def __init__(self, version: int, cuda: bool = False) -> None:
        self._version = version
        self._cuda = cuda
        self._descriptor: int | None = None
        self._kept: list[Tensor] = []

    def send(self, weights: Weights) -> Manifest:
        return self._send_handles(weights) if self._cuda else self._send_bytes(weights)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._kept:
            self._kept.clear()
            torch.cuda.ipc_collect()

    def _send_bytes(self, weights: Weights) -> Manifest:
        if not hasattr(os, "memfd_create"):
            raise WeightSyncError("weight_sync=ipc needs Linux; set actor_rollout_ref.rollout.weight_sync=disk")
        self._descriptor = os.memfd_create("lockstep-weights")
        manifest: Manifest = {}
        offsets: dict[str, int] = {}
        end = 0
        with os.fdopen(os.dup(self._descriptor), "wb") as file:
            for name, tensor in weights:
                tensor = tensor.detach().cpu()
                offsets[name] = end + -end % _ALIGNMENT
                file.write(bytes(offsets[name] - end))
                file.write(as_bytes(tensor).numpy().data)
                end = offsets[name] + tensor.nbytes
                manifest[name] = describe(tensor)
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._offer = MemoryOffer(self._version, manifest, offsets, path, end)
        return manifest

    def _send_handles(self, weights: Weights) -> Manifest:
        from torch.multiprocessing.reductions import reduce_tensor

        manifest = {}
        handles = {}
        for name, tensor in weights:
            tensor = tensor.detach().contiguous()
            self._kept.append(tensor)
            manifest[name] = describe(tensor)
            handles[name] = reduce_tensor(tensor)
        torch.cuda.synchronize()  # the other process reads without waiting for our stream
        self._offer = CudaOffer(self._version, manifest, pickle.dumps(handles))
        return manifest


def _slice(memory: Tensor, offset: int, info: TensorInfo) -> Tensor:
    size = math.prod(info.shape) * info.torch_dtype.itemsize
    return memory[offset : offset + size].view(info.torch_dtype).reshape(info.shape)
