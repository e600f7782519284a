"""The program's side of a test: the process that becomes the program and answers the judge, and the bytes between them.

Without imports of ours but wire.py: it is sent into sandboxes in front of judge.py.
"""

from __future__ import annotations

import os
import select
import sys
import time

from lockstep.judging.sandbox.wire import decode, to_frame

# Starting must be quick: typing, signal and ctypes would each cost as much as everything else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIGKILL = 9
NUM_SHOWN = 300
"""Characters of a message that are kept."""
_LARGEST = 1 << 26


class CaseFailed(BaseException):
    """The case is lost."""


# -- bytes ---------------------------------------------------------------------------------------------------------------------


def seconds_left(deadline: float) -> float:
    """Seconds that a wait may take now. Raises CaseFailed at the deadline."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise CaseFailed("timeout")
    return min(seconds, 0.05)


def read_exactly(descriptor: int, size: int, deadline: float | None = None) -> bytes:
    """That many bytes. Raises EOFError at the end, ValueError for a size out of bounds, CaseFailed at the deadline."""
    if not 0 <= size <= _LARGEST:
        raise ValueError(f"a frame of {size} bytes")
    parts = bytearray()
    while len(parts) < size:
        while deadline is not None and not select.select([descriptor], [], [], seconds_left(deadline))[0]:
            pass
        chunk = os.read(descriptor, min(size - len(parts), 1 << 20))
        if not chunk:
            raise EOFError
        parts += chunk
    return bytes(parts)


def write(descriptor: int, data: bytes) -> None:
    """All of the data."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


# -- the process ---------------------------------------------------------------------------------------------------------------


class Child:
    """A fork that will be the program. In the child itself `is_me` is true and fd 0, 1, 2 are its ends of the pipes; it is there from when
    the judge calls `begin`.
    """

    def __init__(self) -> None:
        pipes = [os.pipe() for _ in range(3)]
        wait, self._begin = os.pipe()
        self.exit_code = -1
        self.pid = os.fork()
        self.group = self.pid
        self.is_me = self.pid == 0
        if self.is_me:
            os.setsid()
            for i, (read, write) in enumerate(pipes):
                os.dup2(read if i == 0 else write, i)
            os.close(self._begin)
            if not os.read(wait, 1):
                os._exit(1)
            os.closerange(3, 64)
            return
        (theirs_in, self.into), (self.out, theirs_out), (self.err, theirs_err) = pipes
        for descriptor in (theirs_in, theirs_out, theirs_err, wait):
            os.close(descriptor)

    def begin(self) -> None:
        os.write(self._begin, b"b")

    def close_into(self) -> None:
        if self.into >= 0:
            os.close(self.into)
        self.into = -1

    def has_ended(self) -> bool:
        if self.pid > 0:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = -1
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.pid < 0


def end_all(group: int) -> None:
    """Kill the program and whatever it left: all in the namespace but the keeper and this process, or its group where there is none."""
    try:
        if os.getpid() == 1 or os.getppid() == 1:
            os.kill(-1, SIGKILL)
        else:
            os.killpg(group, SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def serve(programs: list[str]) -> None:
    """In the child: run the program, then answer the judge until it closes the pipe. What the program prints is dropped."""
    requests = os.dup(0)
    replies = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    objects: list[Any] = []

    def export(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    namespace = fresh_main()
    problem = None
    try:
        exec(compile_first(programs), namespace)
    except BaseException as error:
        problem = ("error", type(error).__name__, f"the program raised {type(error).__name__}: {error}"[:NUM_SHOWN])
    while True:
        try:
            request = read_exactly(requests, int(read_exactly(requests, 8), 16))
        except EOFError:
            os._exit(0)
        try:
            answer = problem or _answer(namespace, *decode(request, objects.__getitem__))
            frame = to_frame(answer, export)
        except BaseException as error:
            frame = to_frame(("error", type(error).__name__, str(error)[:NUM_SHOWN]))
        write(replies, frame)


def _answer(namespace: dict[str, Any], what: str, target: Any, *more: Any) -> tuple[str, Any, str]:
    """(kind of answer, value, message) to one request of the judge."""
    if what == "global":
        found = namespace.get(target, namespace)
        return "value", () if found is namespace else (found,), ""
    if what == "call":
        return "value", target(*more[0], **more[1]), ""
    if what == "getattr":
        return "value", getattr(target, more[0]), ""
    if what == "setattr":
        setattr(target, more[0], more[1])
        return "value", None, ""
    if what == "iter":
        return "value", iter(target), ""
    return "value", tuple([item for item in [next(target, namespace)] if item is not namespace]), ""


def compile_first(programs: list[str]) -> Any:
    """The code of the first that compiles; the error of the last when none does."""
    for source in programs[:-1]:
        try:
            return compile(source.encode("utf-8", "surrogatepass"), "program.py", "exec")
        except (SyntaxError, ValueError):
            pass
    return compile(programs[-1].encode("utf-8", "surrogatepass"), "program.py", "exec")


def fresh_main() -> dict[str, Any]:
    """The namespace of a new module __main__."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv[:] = ["program.py"]
    return module.__dict__
