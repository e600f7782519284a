"""Sent: an engine that generates in a process of its own gets the trainer's weights before the first generation after each change.

`make_sender` is the sender behind a method's name (lockstep.config.weight_sync chooses the name).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, Weights, WeightSender, check_equal


def make_sender(
    method: str, config: RolloutConfig, version: int, num_receivers: int, device: torch.device, same_device: bool = False
) -> WeightSender:
    """A sender for one sync from this process, which has the weights on `device`, to other processes. `same_device`: they use it too."""
    if method == "ipc":
        from lockstep.workers.weight_sync.ipc import IPCSender

        return IPCSender(version, cuda=same_device and device.type == "cuda")
    if method == "broadcast":
        from lockstep.workers.weight_sync.broadcast import BroadcastSender

        return BroadcastSender(version, num_receivers, device, config.weight_sync_timeout_s)
    assert method == "disk", method
    from lockstep.workers.weight_sync.disk import DiskSender

    return DiskSender(version, config.weight_sync_dir)


class Receiver(Protocol):
    """What is needed of a RolloutEngine."""

    version: int

    def receive(self, offer: WeightOffer, device: torch.device) -> Manifest:
        """Load an offer; what was received."""


class SentWeights:
    """Keeps an engine up to date with `export`, the present weights. `make_sender` takes their version, which is the engine's."""

    def __init__(
        self,
        engine: Receiver,
        export: Callable[[], Weights],
        make_sender: Callable[[int], WeightSender],
        device: torch.device,
    ) -> None:
        self._engine, self._export, self._make_sender, self._device = engine, export, make_sender, device
        self._sent_version: int | None = None

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        """Inside, the engine has the trainer's present weights; gives the number of bytes that were sent for it. Raises WeightSyncError."""
        yield self._send() if self._sent_version != self._engine.version else 0

    def _send(self) -> int:
        size, version = 0, self._engine.version

        def counted() -> Weights:
            nonlocal size
            for name, tensor in self._export():
                size += tensor.nbytes
                yield name, tensor

        with self._make_sender(version) as sender:
            sent = sender.send(counted())
            check_equal(sent, self._engine.receive(sender.offer(), self._device))
        self._sent_version = version
        return size
