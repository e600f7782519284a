"""Sent: an engine that generates in a process of its own gets the trainer's weights before the first generation after each change.

`make_sender` is the sender behind a method's name (lockstep.config.weight_sync chooses the name).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, Weights, WeightSender, WeightSource, check_equal


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


class SentWeights(WeightSource):
    """Keeps one engine up to date.

    `export` gives the present weights; `make_sender` takes the number of their version; `receive` makes the engine load an offer, and
    returns what it has received.
    """

    def __init__(
        self, export: Callable[[], Weights], make_sender: Callable[[int], WeightSender], receive: Callable[[WeightOffer], Manifest]
    ) -> None:
        self._export, self._make_sender, self._receive = export, make_sender, receive
        self._version, self._sent_version = 1, 0

    def changed(self) -> None:
        """See `WeightSource.changed`."""
        self._version += 1

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        """Inside, the engine has the trainer's present weights; gives the number of bytes that were sent for it. Raises WeightSyncError."""
        yield self._send() if self._sent_version != self._version else 0

    def _send(self) -> int:
        size = 0

        def counted() -> Weights:
            nonlocal size
            for name, tensor in self._export():
                size += tensor.nbytes
                yield name, tensor

        with self._make_sender(self._version) as sender:
            sent = sender.send(counted())
            check_equal(sent, self._receive(sender.offer()))
        self._sent_version = self._version
        return size
