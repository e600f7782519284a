"""ShareWriter: writes one rank's share of a checkpoint, at once or from copies in host memory while the run continues.

A rank whose disk is full must not leave the others alone in a collective, so nothing is raised while tensors are gathered: the report has
the error.
"""

import json
import mmap
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint import write_child
from lockstep.checkpoint.folders import sync
from lockstep.checkpoint.manifest import Entry, entry_of
from lockstep.checkpoint.saver import describe_failure, write_report
from lockstep.models.weight_files import Tensors, layout, placed, write_weights
from lockstep.utils.device import available_ram
from lockstep.workers.engine.checkpoint import Specs, num_bytes


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


_SHARE_OF_RAM = 0.2
"""Weights, or one of two moments, that would take more of the free host memory on all ranks together than this are written at once."""


class ShareWriter:
    """Writes the share of one rank: `TrainEngine.save(path, writer)`, then `finish(report)`, then maybe `wait`. One save at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, HostFile] = {}
        """The copies, by file, kept for the next save."""
        self._kept: list[tuple[Path, HostFile]] = []
        self._thread: threading.Thread | None = None
        self._pipe: tuple[int, int] | None = None
        """By what is written to its second end the process that writes hears that somebody waits."""
        self.in_background = False
        """Whether the next save may be written later."""
        self.error: str | None = None
        """What went wrong with the last save."""
        self._entries: dict[str, Entry] = {}

    def __call__(self, file: Path, specs: Specs, tensors: Tensors) -> None:
        """Write a file, or keep what is to be in it. Takes all of `tensors`, whatever happens."""
        memory = self._host_file(file, specs) if self.in_background else None
        if memory is not None:
            for place, tensor in placed(file, specs, memory.places, tensors):
                memory.put(place, tensor)
            self._kept.append((file, memory))
            return
        tensors = iter(tensors)
        self._write_now(file, specs, tensors)
        deque(tensors, maxlen=0)

    def finish(self, report: Path, failure: Exception | None = None) -> None:
        """Write what is kept, and then the report, while the caller goes on. `failure` is what the engine itself raised."""
        if failure is not None:
            self.error = describe_failure(failure)
        if self._device.type == "cuda" and self._kept:
            torch.cuda.synchronize(self._device)  # the copies are there, so that the weights may change

        def write() -> None:
            if self.error is None:
                self._write_kept()
            self._kept = []
            try:
                write_report(report, self._entries, self.error)
            except OSError as error:  # then `wait` is who tells
                self.error = self.error or describe_failure(error)

        if self.in_background:
            self._pipe = os.pipe()
            self._thread = threading.Thread(target=write, name="checkpoint share", daemon=True)
            self._thread.start()
        else:
            write()

    @property
    def is_done(self) -> bool:
        """Whether all is written, or given up."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait until all is written, which from now on gives way to nobody; returns what went wrong."""
        if self._thread is not None and self._pipe is not None:
            os.write(self._pipe[1], b"!")
            self._thread.join()
            for end in self._pipe:
                os.close(end)
            self._thread = self._pipe = None
        return self.error

    def begin(self, in_background: bool) -> None:
        """Begin a new save. Waits for the one before."""
        self.wait()
        self.in_background = in_background
        self.error = None
        self._kept = []
        self._entries = {}

    def _host_file(self, file: Path, specs: Specs) -> HostFile | None:
        """Memory for the copy of a file, or None where it would take too much."""
        key = f"{file.parent.name}/{file.name}"
        known = self._memory.get(key)
        if known is not None and known.specs == dict(specs):
            return known
        self._memory.pop(key, None)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if sum(map(num_bytes, specs.values())) * ranks > _SHARE_OF_RAM * available_ram():
            return None
        self._memory[key] = HostFile(specs, self._device)
        return self._memory[key]

    def _write_now(self, file: Path, specs: Specs, tensors: Tensors) -> None:
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

    def _write_kept(self) -> None:
        if self._pipe is None or not self._kept:
            return
        opened: list[int] = []
        try:
            for file, _ in self._kept:
                opened.append(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666))
            jobs = [(memory.memory, descriptor, memory.size) for (_, memory), descriptor in zip(self._kept, opened, strict=True)]
            for (file, _), answer in zip(self._kept, _written(jobs, self._pipe[0]), strict=False):  # fewer where one failed
                if "errno" in answer:
                    file.unlink(missing_ok=True)
                    raise OSError(answer["errno"], os.strerror(answer["errno"]), str(file))
                self._entries[str(file)] = answer
        except Exception as error:  # whatever it is: who waits for the report must hear of it
            self.error = describe_failure(error)
        finally:
            for descriptor in opened:
                os.close(descriptor)


def _written(jobs: list[write_child.Job], hears: int) -> list[dict[str, Any]]:
    """Do the jobs in a process of its own, or here where there is none to be had; returns what came of each, up to one that failed.
    `hears` is where the process reads that somebody waits."""
    command = [sys.executable, "-I", "-S", write_child.__file__, *(":".join(map(str, job)) for job in jobs)]
    descriptors = [descriptor for job in jobs for descriptor in job[:2]]
    try:  # in a session of its own: Ctrl-C in a terminal is for the run, which then saves
        done = subprocess.run(
            command, stdin=hears, stdout=subprocess.PIPE, pass_fds=descriptors, start_new_session=True, check=True
        )
        found = [json.loads(line) for line in done.stdout.splitlines()]
    except (OSError, subprocess.CalledProcessError):  # no room for a process, or somebody ended it
        found = []
    if len(found) < len(jobs) and not any("errno" in answer for answer in found):
        return [answer for answer in write_child.answers(jobs) if answer is not None]
    return found
