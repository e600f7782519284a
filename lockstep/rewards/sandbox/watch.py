"""What a running program's process tree uses, and how to end all of it."""

from __future__ import annotations

import os
import re
import select
import signal
from contextlib import suppress
from typing import Protocol

import psutil

from lockstep.errors import ResourceError
from lockstep.rewards.sandbox.base import Limits, Status
from lockstep.rewards.sandbox.isolation import SCRATCH

_ENDING_S = 1.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Tree(Protocol):
    """A running program and all that it started."""

    def over(self, limits: Limits) -> Status | None:
        """The limit that the tree has passed, if any."""

    def kill(self) -> None:
        """End every process of the tree. May be called again."""

    def close(self) -> None:
        """Free what watching needs."""


class NamespaceTree:
    """A tree that is a process namespace: `first` is its process 1, with which all others die.

    Looks through the namespace's own /proc, so it sees every process in there, whoever its parent is, and no other. Raises
    ResourceError when it cannot look.
    """

    def __init__(self, first: int) -> None:
        self._first = self._proc = self._scratch = -1
        try:
            self._first = os.pidfd_open(first)
            self._proc = os.open(f"/proc/{first}/root/proc", os.O_RDONLY | os.O_DIRECTORY)
            self._scratch = os.open(f"/proc/{first}/root{SCRATCH}", os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            # A process that is just ending has no root any more.
            if self._first >= 0 and not select.select([self._first], [], [], _ENDING_S)[0]:
                self.kill()
                self.close()
                raise ResourceError(f"the sandboxed process {first} cannot be watched: {error}") from error

    def over(self, limits: Limits) -> Status | None:
        if self._proc < 0 or self._scratch < 0:
            return None
        try:
            pids = [name for name in os.listdir(self._proc) if name.isdigit()]
            used = os.statvfs(self._scratch)
        except OSError:  # its processes are gone
            return None
        if len(pids) > limits.num_processes:
            return "processes"
        if used.f_files - used.f_ffree > limits.num_files:
            return "files"
        # Resident memory counts a shared page once a process, which is quick and never too little; the share is right but slow.
        most = limits.memory_mb << 20
        is_over = sum(map(self._resident, pids)) > most and sum(map(self._share, pids)) > most
        return "memory" if is_over else None

    def kill(self) -> None:
        if self._first >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    def close(self) -> None:
        for descriptor in (self._first, self._proc, self._scratch):
            if descriptor >= 0:
                os.close(descriptor)

    def _resident(self, pid: str) -> int:
        fields = self._look(f"{pid}/statm").split()
        return int(fields[1]) * _PAGE if fields else 0

    def _share(self, pid: str) -> int:
        """Resident memory where a page that n processes share counts 1/n for each."""
        found = re.search(rb"^Pss:\s*(\d+) kB", self._look(f"{pid}/smaps_rollup"), re.MULTILINE)
        return int(found[1]) << 10 if found else self._resident(pid)

    def _look(self, path: str) -> bytes:
        """A file of the namespace's /proc; empty when the process is gone."""
        try:
            file = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        except OSError:
            return b""
        try:
            return os.read(file, 4096)
        except OSError:
            return b""
        finally:
            os.close(file)


class GroupTree:
    """A tree without a namespace (weak isolation): the process group of `first` and the descendants that can be found. One that starts
    a session of its own and whose parent ends is lost.
    """

    def __init__(self, first: int) -> None:
        self._first = first

    def over(self, limits: Limits) -> Status | None:
        processes = self._processes()
        if len(processes) > limits.num_processes:
            return "processes"
        return "memory" if sum(map(_resident, processes)) > limits.memory_mb << 20 else None

    def kill(self) -> None:
        processes = self._processes()
        with suppress(ProcessLookupError):
            os.killpg(self._first, signal.SIGKILL)
        for process in processes:
            with suppress(psutil.Error):
                process.kill()

    def close(self) -> None:
        pass

    def _processes(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self._first)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
