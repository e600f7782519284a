"""Sandbox: runs a bounded number of programs at a time, each with limits, and returns a Result or raises for each."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError, ResourceError

Status = Literal["ok", "error", "killed", "timeout", "memory", "output", "processes", "files"]
"""How a program ended.

ok: exit code 0. error: another exit code. killed: a signal that the sandbox did not send (a crash; the kernel at the limit of CPU
time). The others name the limit at which the sandbox ended the whole process tree.
"""


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """Limits of one program. Memory counts the whole process tree; scratch files are not included."""

    wall_s: float = 10.0
    """Seconds from the first instruction to the end; also the CPU seconds of each process."""
    memory_mb: int = 1024
    """Resident memory of all processes together, and address space of each."""
    scratch_mb: int = 64
    """Size of the private folder, the only place that the program can write to; also the largest file."""
    num_files: int = 10_000
    """Files and folders in the private folder."""
    num_processes: int = 64
    """Processes and threads at a time."""
    num_open_files: int = 64
    """Open files of each process."""
    output_bytes: int = 1024 * 1024
    """Length of stdout, and of stderr."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"the sandbox's limit {name} must be more than 0, not {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a program."""

    status: Status
    exit_code: int | None
    """None when the sandbox ended it; 128 + n when signal n did."""
    stdout: str
    """Bytes that are not UTF-8 are replaced; cut at `ProgramLimits.output_bytes`, with a mark."""
    stderr: str
    seconds: float
    """Wall time of the program, without the start of the sandbox."""


def judge_program() -> str:
    """Return judge.py as one file, after the files that it imports."""
    wire, *others = (
        Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("wire.py", "same.py", "program.py", "judge.py")
    )
    bodies = [text.partition("from __future__ import annotations\n")[2] for text in others]
    return re.sub(r"(?m)^from lockstep\.[^(]*?(\([^)]*\))?\n", "", "".join([wire, *bodies]))


def exit_status(exit_code: int, stderr: str) -> Status:
    """Return the status of a program that ended by itself. Python's MemoryError counts as the limit of memory."""
    if exit_code == 0:
        return "ok"
    if exit_code > 128:
        return "killed"
    return "memory" if stderr.rstrip().rpartition("\n")[2].startswith("MemoryError") else "error"


class Sandbox(ABC):
    """Runs programs, at most `max_concurrent` at once. Safe to use from many threads.

    Args:
        max_concurrent: Programs at a time; a further one waits.
        limits: What each may use.
        queue_s: Longest wait for a place.
    """

    def __init__(self, max_concurrent: int, limits: ProgramLimits, queue_s: float = 300.0) -> None:
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent of a sandbox must be at least 1, not {max_concurrent}")
        self.max_concurrent = max_concurrent
        self.limits = limits
        self.queue_s = queue_s
        self._free = threading.Condition()
        self._num_running = 0
        self._closed = False

    def run(self, program: str, stdin: str = "", wall_s: float | None = None) -> Result:
        """Run a Python program in a fresh process tree that is gone when this returns.

        `wall_s` replaces that of the limits. Whatever the program does is a Result. Raises ResourceError when the sandbox itself
        fails, when no place is free within `queue_s`, or when it is closed meanwhile.
        """
        with self._place():
            return self._execute(program, stdin, self.limits.wall_s if wall_s is None else wall_s)

    def judge(self, frames: bytes, wall_s: float) -> Result:
        """`run` the judge (judge.py) on what it reads."""
        with self._place():
            return self._execute(None, frames.decode("ascii"), wall_s)

    async def run_async(self, program: str, stdin: str = "", wall_s: float | None = None) -> Result:
        """`run`, on a thread of the event loop's executor."""
        return await asyncio.to_thread(self.run, program, stdin, wall_s)

    def check(self) -> None:
        """Raise ResourceError unless a program runs and its output comes back."""
        result = self.run("print(6 * 7)")
        if (result.status, result.stdout) != ("ok", "42\n"):
            raise ResourceError(f"the sandbox does not run programs: 'print(6 * 7)' gave {result}")

    def close(self) -> None:
        """End every program that runs; later and waiting calls of `run` raise. Returns when nothing runs any more."""
        with self._free:
            self._closed = True
            self._free.notify_all()
        self._end_all()
        with self._free:
            if not self._free.wait_for(lambda: self._num_running == 0, timeout=30.0):
                raise ResourceError(f"{self._num_running} sandboxed programs did not end within 30 s of being killed")

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _execute(self, program: str | None, stdin: str, wall_s: float) -> Result:
        """Run one program, None being the judge; called with a place held."""

    @abstractmethod
    def _end_all(self) -> None:
        """Make every `_execute` that is under way end soon, by raising ResourceError."""

    @contextmanager
    def _place(self) -> Iterator[None]:
        deadline = time.monotonic() + self.queue_s
        with self._free:
            free = self._free.wait_for(lambda: self._closed or self._num_running < self.max_concurrent, deadline - time.monotonic())
            if self._closed:
                raise ResourceError("the sandbox is closed")
            if not free:
                raise ResourceError(
                    f"no place in the sandbox within {self.queue_s:g} s: {self.max_concurrent} programs run at a time. "
                    "Raise reward.sandbox.max_concurrent or lower reward.sandbox.wall_s"
                )
            self._num_running += 1
        try:
            yield
        finally:
            with self._free:
                self._num_running -= 1
                self._free.notify_all()
