"""What the ways to send weights have in common: a sender, an offer that can be pickled, and a manifest that both sides compare.

```text
one worker has both:  with source.borrowed(): generate    shared: the trainer's own tensors; sent: a copy, by a sender
two workers:          sender.send(weights) -> Manifest, sender.offer()  --(driver)-->  RolloutEngine.receive(offer) -> Manifest
```

A manifest has name, shape, dtype and checksum of every tensor. The sender makes it from what it sends, the receiver from what it has
received (a module: from its parameters, after they were written); where they differ the sync has failed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from lockstep.errors import WeightSyncError

Weights = Iterable[tuple[str, Tensor]]
"""(Hugging Face name, whole tensor); a tied weight comes once."""

_WORD = 8
_CHUNK = 1 << 22
"""Words that are summed at once."""


class TensorInfo(NamedTuple):
    """One tensor of a manifest."""

    shape: tuple[int, ...]
    dtype: str
    """As torch prints it: "torch.bfloat16"."""
    checksum: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype.removeprefix("torch."))


Manifest = dict[str, TensorInfo]
Stream = Iterable[tuple[str, TensorInfo, Tensor]]
"""Tensors as they arrive, with what the sender says of each."""


class WeightOffer(ABC):
    """Where a receiver finds one version of the weights. It can be pickled; it is good until the sender is closed."""

    version: int
    manifest: Manifest | None
    """None where the tensors are sent while they are received: then each comes with its own line of it."""

    @abstractmethod
    def open(self, device: torch.device, receiver: int) -> Stream:
        """The tensors, on any device. `receiver` numbers the receivers of one offer, from 0."""


class WeightSender(ABC):
    """The trainer's side of one sync: `send` once, `close` when every receiver is done."""

    _offer: WeightOffer | None = None

    @abstractmethod
    def send(self, weights: Weights) -> Manifest:
        """Send every tensor; the manifest of what was sent. It waits for the receivers of an offer without a manifest."""

    def offer(self) -> WeightOffer:
        """What the receivers need. After `send`; before it where the tensors are sent while they are received."""
        assert self._offer is not None, "send() comes first"
        return self._offer

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Verified:
    """An iterator over (name, tensor) that raises WeightSyncError at the first tensor that is not what was sent.

    With a whole manifest everything is checked before the first tensor comes, so that a receiver writes all or nothing.
    """

    def __init__(self, stream: Stream, manifest: Manifest | None) -> None:
        self.manifest: Manifest = {}
        """What was received so far."""
        self._is_checked = manifest is not None
        if manifest is not None:
            stream = list(stream)
            check_equal(manifest, {name: describe(tensor) for name, _, tensor in stream})
        self._stream = stream

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, info, tensor in self._stream:
            found = info if self._is_checked else describe(tensor)
            if found != info:
                raise WeightSyncError(_difference(name, info, found))
            self.manifest[name] = found
            yield name, tensor


def received(offer: WeightOffer, device: torch.device, receiver: int = 0) -> Verified:
    """The offer's tensors, verified. They are good until the sender is closed. Raises WeightSyncError."""
    return Verified(offer.open(device, receiver), offer.manifest)


def describe(tensor: Tensor) -> TensorInfo:
    """A tensor's line of the manifest."""
    return TensorInfo(tuple(tensor.shape), str(tensor.dtype), checksum(tensor))


def check_equal(sent: Manifest, received: Manifest) -> None:
    """Raise WeightSyncError, naming the first tensor, unless both sides have the same."""
    missing = [name for name in sent if name not in received]
    if missing:
        raise WeightSyncError(f"{len(missing)} of {len(sent)} tensors did not arrive, first {missing[0]}")
    extra = [name for name in received if name not in sent]
    if extra:
        raise WeightSyncError(f"{len(extra)} tensors arrived that were not sent, first {extra[0]}")
    for name, info in sent.items():
        if received[name] != info:
            raise WeightSyncError(_difference(name, info, received[name]))


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as a vector of bytes; a copy only where it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> int:
    """sum_i word_i * (2i + 1) modulo 2^64 over the tensor's bytes as 64-bit words, the last one filled up with zeros.

    The same on every device. A change in one word always shows (an odd factor can be undone); words in another order show as well, which a
    plain sum would not see.
    """
    data = as_bytes(tensor)
    if len(data) % _WORD or data.storage_offset() % _WORD:
        data = torch.nn.functional.pad(data, (0, -len(data) % _WORD)).clone()
    words = data.view(torch.int64)
    total = 0
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        factors = torch.arange(2 * start + 1, 2 * (start + len(part)) + 1, 2, device=part.device)
        total += int((part * factors).sum())
    return total % (1 << 64)


def _difference(name: str, sent: TensorInfo, received: TensorInfo) -> str:
    return f"{name} is not what was sent: {_show(sent)} was sent, {_show(received)} arrived"


def _show(info: TensorInfo) -> str:
    return f"{info.dtype.removeprefix('torch.')}{list(info.shape)} with checksum {info.checksum:016x}"


def copy_weights(module: nn.Module, weights: Weights) -> None:
    """Copy (Hugging Face name, tensor) pairs into a module, in place. Raises WeightSyncError unless every parameter gets a value, for a
    name that the module does not have, and for another shape."""
    targets = _targets(module)
    missing = set(parameter_slots(module))
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            raise WeightSyncError(f"the weight update has {name}, which {type(module).__name__} does not have")
        if target.shape != tensor.shape:
            raise WeightSyncError(f"the weight update has {name} of shape {list(tensor.shape)}, the model {list(target.shape)}")
        target.copy_(tensor)
        missing.discard(name)
    if missing:
        raise WeightSyncError(f"the weight update left {len(missing)} parameters out, first {sorted(missing)[:3]}")


def module_manifest(module: nn.Module, names: Manifest) -> Manifest:
    """What the module has under these names."""
    targets = _targets(module)
    return {name: describe(targets[name]) for name in names}


def parameter_slots(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each parameter, by the first of its names, every (module, attribute) that holds it: tied weights have several."""
    names: dict[int, str] = {}
    slots: dict[str, list[tuple[nn.Module, str]]] = {}
    for prefix, part in module.named_modules():
        for attribute, parameter in part._parameters.items():
            if parameter is not None:
                name = names.setdefault(id(parameter), f"{prefix}.{attribute}" if prefix else attribute)
                slots.setdefault(name, []).append((part, attribute))
    return slots


def _targets(module: nn.Module) -> dict[str, Tensor]:
    """Parameters (a tied one under the first of its names) and buffers."""
    return {name: parameter.data for name, parameter in module.named_parameters()} | dict(module.named_buffers())
