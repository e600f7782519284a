"""broadcast: over the network, gloo on CPUs and nccl on GPUs, to any number of receivers at once.

Sender and receivers meet in a process group of this sync alone (the trainer's own group has other members), so a sync that failed leaves
nothing behind. Tensors are sent one by one while the trainer gathers them; each is preceded by its line of the manifest, the last one by
an end mark.
"""

import pickle
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import WeightSyncError
from lockstep.workers.weight_sync.base import Manifest, TensorInfo, WeightOffer, Weights, WeightSender, as_bytes, describe


@dataclass(frozen=True)
class BroadcastOffer(WeightOffer):
    """Where the group of one sync meets."""

    version: int
    host: str
    port: int
    num_receivers: int
    cuda: bool
    """Whether tensors travel between GPUs (nccl). Between two GPUs not run: the machine of our tests has one."""
    timeout_s: float
    """How long one side waits for the other, to meet and for each tensor."""
    manifest: Manifest | None = None

    def open(self, device: torch.device, receiver: int) -> Iterator[tuple[str, TensorInfo, Tensor]]:
        group = _Group(self, None, receiver + 1, device)
        while (line := group.broadcast_object(None)) is not None:
            name, info = line
            tensor = torch.empty(info.shape, dtype=info.torch_dtype, device=device)
            group.broadcast(as_bytes(tensor))
            yield name, info, tensor


class BroadcastSender(WeightSender):
    """Rank 0 of the group of one sync."""

    def __init__(self, version: int, num_receivers: int, device: torch.device, timeout_s: float) -> None:
        self._device = device
        host = _own_address()
        self._store: dist.Store | None = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self._offer: BroadcastOffer = BroadcastOffer(
            version, host, self._store.port, num_receivers, device.type == "cuda", timeout_s
        )

    def send(self, weights: Weights) -> Manifest:
        assert self._store is not None, "the sender is closed"
        group = _Group(self._offer, self._store, 0, self._device)
        manifest: Manifest = {}
        for name, tensor in weights:
            tensor = tensor.detach().to(self._device).contiguous()
            manifest[name] = describe(tensor)
            group.broadcast_object((name, manifest[name]))
            group.broadcast(as_bytes(tensor))
        group.broadcast_object(None)
        return manifest

    def close(self) -> None:
        self._store = None


class _Group:
    """The process group of one sync; every failure in it is a WeightSyncError."""

    def __init__(self, offer: BroadcastOffer, store: dist.Store | None, rank: int, device: torch.device) -> None:
        """`store` is rank 0's own; the others connect to it."""
        self.device = device
        self._version = offer.version
        size = 1 + offer.num_receivers
        timeout = timedelta(seconds=offer.timeout_s)
        try:
            store = store or dist.TCPStore(offer.host, offer.port, is_master=False, timeout=timeout)
            if offer.cuda:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, timeout)
        except RuntimeError as error:
            raise self._failed("the two sides did not meet", error) from error

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's vector, on every rank; in place."""
        if len(tensor):
            try:
                self._group.broadcast(tensor, 0).wait()
            except RuntimeError as error:
                raise self._failed("a side is gone or was too slow", error) from error
        return tensor

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        size = self.broadcast(torch.tensor([len(data)], device=self.device))
        data = data if self._group.rank() == 0 else torch.empty(int(size), dtype=torch.uint8, device=self.device)
        return pickle.loads(bytes(self.broadcast(data).cpu().tolist()))

    def _failed(self, what: str, error: RuntimeError) -> WeightSyncError:
        return WeightSyncError(f"the broadcast of weights of version {self._version} broke off, {what}: {error}")


def _own_address() -> str:
    """An address under which other machines reach this one."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
