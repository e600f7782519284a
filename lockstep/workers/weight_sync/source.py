"""The weights of a rollout in the actor's own worker: shared with the trainer, or sent to the engine's process.

Shared: the decoder's parameters are the trainer's own tensors. On one rank in one precision nothing is copied. If they cannot be the same
tensors (shards on several ranks, a lower precision for generation), whole tensors are made for one generation and dropped after it. On one
GPU such a copy stays, because captured graphs hold its addresses; before each generation the trained weights are written into it again.

Sent: an engine in a separate process gets the trainer's weights before the first generation after each change.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, Weights, WeightSender, check_equal, parameter_slots


class Exporter(Protocol):
    """What is needed of a TrainEngine."""

    device: torch.device
    world_size: int
    exports_copies: bool
    constant: frozenset[str]

    @property
    def decoder(self) -> PreTrainedModel | None:
        """A plain module of the same model."""

    def decoder_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name in `decoder`, whole tensor)."""


class SharedWeights:
    """The decoder of an engine borrows its weights. Raises ValueError for an engine without a decoder."""

    def __init__(self, engine: Exporter, dtype: torch.dtype) -> None:
        if engine.decoder is None:
            raise ValueError("the engine was made without a decoder")
        self._engine = engine
        self.decoder = engine.decoder
        self._dtype = dtype
        self._slots = parameter_slots(self.decoder)
        self._engine_copies = engine.world_size > 1 or engine.exports_copies
        for module in self.decoder.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer if buffer is None else buffer.to(engine.device)
        self.keeps_copy = engine.device.type == "cuda" and engine.world_size == 1 and self._needs_copy()
        """Whether the decoder has a copy of its own that keeps its place in memory (or where the decoder has moved it)."""
        self._drop()

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        """Inside, the decoder has the engine's present weights; gives the number of bytes that had to be copied for it."""
        copied = 0
        try:
            for name, tensor in self._engine.decoder_weights():
                if self.keeps_copy and name in self._slots:
                    copied += self._write(name, tensor)
                    continue
                borrowed = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
                if self._engine_copies or borrowed.data_ptr() != tensor.data_ptr():
                    copied += borrowed.nbytes
                self._assign(name, borrowed)
            yield copied
        finally:
            if not self.keeps_copy:
                self._drop()

    def _needs_copy(self) -> bool:
        weights = self._engine.decoder_weights
        return self._engine_copies or any(tensor.is_floating_point() and tensor.dtype != self._dtype for _, tensor in weights())

    def _write(self, name: str, tensor: Tensor) -> int:
        """Copy into the decoder's own parameter, made at the first time, after which one that never changes stays; returns the bytes."""
        module, attribute = self._slots[name][0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        if parameter.is_meta:
            self._assign(name, tensor.to(self._dtype, copy=True))
        elif name in self._engine.constant:
            return 0
        else:
            parameter.data.copy_(tensor)
        return parameter.nbytes

    def _assign(self, name: str, tensor: Tensor) -> None:
        parameter = nn.Parameter(tensor, requires_grad=False)
        for module, attribute in self._slots.get(name, ()):
            module._parameters[attribute] = parameter

    def _drop(self) -> None:
        for name, places in self._slots.items():
            module, attribute = places[0]
            parameter = module._parameters[attribute]
            assert parameter is not None
            self._assign(name, torch.empty_like(parameter, device="meta"))


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
        self._engine = engine
        self._export = export
        self._make_sender = make_sender
        self._device = device
        self._sent_version: int | None = None

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        """Inside, the engine has the trainer's present weights; gives the number of bytes that were sent for it. Raises WeightSyncError."""
        yield self._send() if self._sent_version != self._engine.version else 0

    def _send(self) -> int:
        size = 0
        version = self._engine.version

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
