"""What a running program's process tree uses, and how to end all of it."""

import os
import re
import select
import signal
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol

import psutil

from lockstep.errors import ResourceError
from lockstep.judging.sandbox.base import ProgramLimits, Status
from lockstep.judging.sandbox.isolation import SCRATCH

_ENDING_S = 1.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Tree(Protocol):
    """A running program and all that it started."""

    def over(self, limits: ProgramLimits) -> Status | None:
        """The limit that the tree has passed, if any."""

    def kill(self) -> None:
        """End every process of the tree. May be called again."""

    def close(self) -> None:
        """Free what watching needs."""


class NamespaceTree:
    """A tree that is a process namespace: `first` is its process 1, with which all others die.

    Looks through the namespace's own /proc, so it sees every process in there, whoever its parent is, and no other. Where nobody else
    does (no control group), it `counts_sockets` as full. Raises ResourceError when it cannot look.
    """

    def __init__(self, first: int, counts_sockets: bool) -> None:
        self._counts_sockets = counts_sockets
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

    def over(self, limits: ProgramLimits) -> Status | None:
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
        # Address space is quick to read and never too little; the share is right but slow.
        most = (limits.memory_mb << 20) - (self._socket_buffers() if self._counts_sockets else 0)
        is_over = sum(map(self._address_space, pids)) > most and sum(map(self._share, pids)) > most
        return "memory" if is_over else None

    def kill(self) -> None:
        if self._first >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    def close(self) -> None:
        for descriptor in (self._first, self._proc, self._scratch):
            if descriptor >= 0:
                os.close(descriptor)

    def _address_space(self, pid: str, field: int = 0) -> int:
        fields = self._look(f"{pid}/statm").split()
        return int(fields[field]) * _PAGE if fields else 0

    def _share(self, pid: str) -> int:
        """Memory, in swap too, where a page that n processes share counts 1/n for each; all that is resident where that is not told."""
        found = re.findall(rb"^(?:Swap)?Pss:\s*(\d+) kB", self._look(f"{pid}/smaps_rollup"), re.MULTILINE)
        return sum(map(int, found)) << 10 if found else self._address_space(pid, field=1)

    def _socket_buffers(self) -> int:
        """The most that the kernel may hold for the sockets of the namespace: nobody says how full they are."""
        told = self._look("1/net/sockstat")
        used, tcp = (
            int(found[1]) if (found := re.search(name, told)) else 0 for name in (rb"sockets: used (\d+)", rb"TCP: inuse (\d+)")
        )
        return (used - tcp) * _buffer_sizes()[0] + tcp * _buffer_sizes()[1] if used else 0

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


@cache
def _buffer_sizes() -> tuple[int, int]:
    """The largest buffers of a socket, and of one of TCP."""
    plain = 2 * max(_sysctl("net/core/wmem_max"), _sysctl("net/core/rmem_max"))
    return plain, max(plain, _sysctl("net/ipv4/tcp_wmem") + _sysctl("net/ipv4/tcp_rmem"))


def _sysctl(name: str) -> int:
    """The last number of a setting; the kernel's default for a buffer where it cannot be read."""
    try:
        return int(Path("/proc/sys", name).read_text().split()[-1])
    except OSError:
        return 212992


class GroupTree:
    """A tree without a namespace (weak isolation): the process group of `first` and the descendants that can be found. One that starts
    a session of its own and whose parent ends is lost.
    """

    def __init__(self, first: int) -> None:
        self._first = first

    def over(self, limits: ProgramLimits) -> Status | None:
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
