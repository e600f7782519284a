"""A model's weights in host memory while it is idle.

What is moved is the memory behind the tensors, not the tensors: every parameter, shard and view stays the object it was, so nothing that
holds one (FSDP, the optimizer) notices. An idle weight has no memory and must not be touched; engines use theirs inside `in_use` only.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Offload:
    """Memory of the tensors that `weights` and `gradients` name, on the device or on the host. It starts on the device."""

    weights: Callable[[], Iterable[Tensor]]
    """What is kept: the same tensors at every call."""
    gradients: Callable[[], Iterable[Tensor]]
    """What exists only now and then: moved too, without a place on the host of its own."""
    changed: bool = True
    """Whether a weight was written since it was last on the host; set by who writes."""
    _kept: list[Tensor] = field(default_factory=list)
    _waiting: list[tuple[torch.UntypedStorage, Tensor]] = field(default_factory=list)
    _users: int = 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the tensors are on the device; outside of all such contexts they are on the host."""
        if self._users == 0:
            self.to_device()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self.to_host()

    def to_host(self) -> None:
        """Copy what changed to the host (pinned memory for a GPU) and free the device's memory."""
        assert not self._waiting, "it is on the host already"
        storages = _storages(self.weights())
        if not self._kept:
            self._kept = [_host_memory(storage) for storage in storages]
        for storage, host in zip(storages, self._kept, strict=True):
            self._leave(storage, host, copy=self.changed)
        for storage in _storages(self.gradients()):
            self._leave(storage, _host_memory(storage), copy=True)
        self.changed = False
        if any(storage.device.type == "cuda" for storage, _ in self._waiting):
            torch.cuda.synchronize()

    def to_device(self) -> None:
        """Give every tensor its memory and its values back."""
        for storage, host in self._waiting:
            storage.resize_(host.nbytes)
            _bytes(storage).copy_(host, non_blocking=True)
        self._waiting = []

    def _leave(self, storage: torch.UntypedStorage, host: Tensor, copy: bool) -> None:
        if copy:
            host.copy_(_bytes(storage), non_blocking=True)
        self._waiting.append((storage, host))
        # The caching allocator hands freed memory to later work of the same stream only, which comes after the copy.
        storage.resize_(0)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The memory behind tensors, each piece once, in order."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if tensor.numel()}
    return list(found.values())


def _host_memory(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move what the optimizer remembers of each parameter to a device. The count of steps stays where it is."""
    for remembered in optimizer.state.values():
        for name, value in remembered.items():
            if isinstance(value, Tensor) and name != "step":
                remembered[name] = value.to(device)
