"""Sent: an engine that generates in a process of its own gets the trainer's weights before the first generation after each change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.workers.weight_sync.base import Manifest, Parcel, WeightLender, Weights, WeightSender, check_equal


class SentWeights(WeightLender):
    """Keeps one engine up to date.

    `export` gives the present weights; `make_sender` takes the number of their version; `receive` makes the engine load a parcel, and
    returns what it has received.
    """

    def __init__(
        self, export: Callable[[], Weights], make_sender: Callable[[int], WeightSender], receive: Callable[[Parcel], Manifest]
    ) -> None:
        self._export, self._make_sender, self._receive = export, make_sender, receive
        self._version, self._sent_version = 1, 0

    def changed(self) -> None:
        """The trainer's weights are others now."""
        self._version += 1

    @contextmanager
    def lent(self) -> Iterator[int]:
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
            check_equal(sent, self._receive(sender.parcel()))
        self._sent_version = self._version
        return size
