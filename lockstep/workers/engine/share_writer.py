"""ShareWriter: writes what one rank has to write of a checkpoint, at once, or from copies in host memory while the run goes on.

A rank whose disk is full must not leave the others alone in a collective, so nothing is raised while tensors are gathered: what went wrong
is in the report.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.folders import sync
from lockstep.checkpoint.manifest import Entry, entry_of
from lockstep.checkpoint.saver import describe_failure, write_report
from lockstep.models.weight_file import Tensors, write_weights
from lockstep.utils.memory import available_ram
from lockstep.workers.engine.checkpoint import Specs, num_bytes

_SHARE_OF_RAM = 0.2
"""Weights, or one of two moments, that would take more of the free host memory on all ranks together than this are written at once."""


class ShareWriter:
    """Writes the share of one rank: `TrainEngine.save(path, writer)`, then `finish(report)`, then maybe `wait`. One save at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[tuple[str, str], Tensor] = {}
        """Host memory of the copies, by file and name, kept for the next save: making it takes six times as long as filling it."""
        self._kept: list[tuple[Path, Specs, dict[str, Tensor]]] = []
        self._thread: threading.Thread | None = None
        self.in_background = False
        """Whether the next save may be written later."""
        self.error: str | None = None
        """What went wrong with the last save."""
        self._entries: dict[str, Entry] = {}

    def __call__(self, file: Path, specs: Specs, tensors: Tensors) -> None:
        """Write a file, or keep what is to be in it. Takes all of `tensors`, whatever happens."""
        key = f"{file.parent.name}/{file.name}"
        missing = sum(num_bytes(spec) for name, spec in specs.items() if (key, name) not in self._memory)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self.in_background and missing * ranks <= _SHARE_OF_RAM * available_ram():
            self._kept.append((file, specs, {name: self._copy(key, name, tensor) for name, tensor in tensors}))
            return
        tensors = iter(tensors)
        self._write(file, specs, tensors)
        deque(tensors, maxlen=0)

    def finish(self, report: Path, failure: Exception | None = None) -> None:
        """Write what is kept, in a thread, and then the report. `failure` is what the engine itself raised."""
        if failure is not None:
            self.error = describe_failure(failure)
        if self._device.type == "cuda" and self._kept:
            torch.cuda.synchronize(self._device)  # the copies are there, so that the weights may change

        def write() -> None:
            for file, specs, tensors in self._kept:
                self._write(file, specs, tensors.items())
            self._kept = []
            try:
                write_report(report, self._entries, self.error)
            except OSError as error:  # then `wait` is who tells
                self.error = self.error or describe_failure(error)

        if self.in_background:
            self._thread = threading.Thread(target=write, name="checkpoint share", daemon=True)
            self._thread.start()
        else:
            write()

    def wait(self) -> str | None:
        """Wait until all is written; returns what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.error

    def begin(self, in_background: bool) -> None:
        """Begin a new save. Waits for the one before."""
        self.wait()
        self.in_background, self.error, self._kept, self._entries = in_background, None, [], {}

    def _write(self, file: Path, specs: Specs, tensors: Tensors) -> None:
        if self.error is not None:
            return
        try:
            write_weights(file, specs, tensors)
            sync(file)
            self._entries[str(file)] = entry_of(file)
        except OSError as error:
            error.filename = error.filename or str(file)
            self.error = describe_failure(error)
            file.unlink(missing_ok=True)

    def _copy(self, key: str, name: str, tensor: Tensor) -> Tensor:
        host = self._memory.get((key, name))
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self._memory[key, name] = host
        return host.copy_(tensor.detach(), non_blocking=True)
