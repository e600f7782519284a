"""An object in a process of its own, called over a pipe: what an inference engine that wants the process for itself lives in.

```text
parent: EngineProcess.stream("generate", ...) -> pipe -> child: target.generate(...), each value it yields -> pipe -> parent
child ends (killed, crashed)  -> the pipe closes -> WorkerDied at once, with the exit code and the end of its output
child hangs                   -> nothing comes, or is taken, for `silence_s` -> WorkerTimeout, and it is killed
parent ends                   -> the pipe closes -> the child ends itself
```

A method of the target is a generator; None that it yields is a sign of life, and not passed on. When the parent gives up a stream (closes
the iterator), the generator is closed at its next value. What the parent sends to it meanwhile (`Exchange`) is what a `yield` gives: a list
of messages, or None. A generator that has nothing to do until then yields IDLE.

A call that is interrupted (Ctrl-C, Stopped) is given up without waiting for its end. Answers have the number of their call: what comes
later of one that was given up is passed over.
"""

import contextlib
import importlib
import json
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from lockstep.errors import WorkerDied, WorkerError, WorkerTimeout

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from lockstep.backends.process import serve; serve()"
IDLE = "idle"
"""What a generator yields that waits for a message."""
_TAIL = 2000
"""Characters of the child's output that an error shows."""
_BEAT_S = 1.0
"""How often signs of life are sent at most."""


class _Call(NamedTuple):
    """What the parent asks for. Whatever else it sends is for the call that goes on; None ends that."""

    number: int
    method: str
    args: tuple[Any, ...]


class ChildProcess:
    """A program whose output is kept for error messages, and that ends with this object."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=pass_fds,
            start_new_session=True,  # so that what it starts can be killed with it
        )
        self._finalizer = weakref.finalize(self, _kill, self._process)
        self.pid = self._process.pid
        self.label = f"{name} (pid {self.pid})"
        """How errors name it."""

    @property
    def has_ended(self) -> bool:
        """Whether it is no longer there."""
        return self._process.poll() is not None

    def died(self, when: str) -> WorkerDied:
        """The error that says how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)  # its connections close a moment before it has an exit code
        code = self._process.poll()
        if code is None:
            how = "its connection is closed"
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return WorkerDied(self.label, f"{when} ({how}){self._output()}")

    def late(self, what: str, timeout_s: float) -> WorkerTimeout:
        """The error that says that it was too slow; kills it."""
        error = WorkerTimeout(self.label, f"{what} gave no sign of life for {timeout_s:g} s, and it was killed{self._output()}")
        self.close()
        return error

    def close(self) -> None:
        """End it, whatever it does. May be called again."""
        self._finalizer()
        self._log.close()

    def _output(self) -> str:
        if self._log.closed:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL))
        text = self._log.read().decode(errors="replace").strip()
        return f"; the end of its output:\n{text}" if text else ""


class EngineProcess:
    """`target` ("package.module:Class") built with `options` in a new process. Not for several threads at once.

    Raises WorkerError with the child's traceback when the constructor raises, WorkerDied, and WorkerTimeout after `start_s`.
    """

    def __init__(
        self,
        name: str,
        target: str,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        *,
        start_s: float,
        silence_s: float,
    ) -> None:
        self._silence_s = silence_s
        self._connection, theirs = Pipe()
        _limit(self._connection, silence_s)
        with theirs:
            paths = json.dumps([path or os.getcwd() for path in sys.path])
            command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), paths]
            self._child = ChildProcess(name, command, os.environ | dict(environment), [theirs.fileno()])
        self.pid = self._child.pid
        self._is_streaming = self._is_open = False
        self._number = 0
        """Of the last call that was begun, 0 for the start. `_is_open`: its end has not come, and it was not given up."""
        try:
            self._send((target, dict(options)))
            self._expect_end("its start", start_s)
        except BaseException:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the child is no longer there."""
        return self._child.has_ended

    def call(self, method: str, *args: Any) -> Any:
        """The last value that the method yields, or None. Raises as `stream` does."""
        value = None
        for item in self.stream(method, *args):
            value = item
        return value

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        """What the method yields, as it comes. Raises WorkerError with the child's traceback, WorkerDied, WorkerTimeout."""
        self._begin(method, args)
        try:
            while (message := self._receive(f"{method}()", self._silence_s))[0] != "end":
                if message[1] is not None:
                    yield message[1]
        except GeneratorExit:
            self._send(None)
            self._expect_end(f"{method}()", self._silence_s)
            raise
        finally:
            self._leave()

    def close(self) -> None:
        """End the child, whatever it does. May be called again."""
        self._child.close()
        self._connection.close()

    def _begin(self, method: str, args: Sequence[Any]) -> None:
        assert not self._is_streaming, "one stream at a time: close the other one first"
        self._leave()
        self._number = self._number + 1
        self._is_open = True
        self._send(_Call(self._number, method, tuple(args)))
        self._is_streaming = True

    def _leave(self) -> None:
        """No call is going on for the caller. One that is not over ends at its next value; nobody waits for that."""
        self._is_streaming = False
        if self._is_open and not self.has_ended:
            with contextlib.suppress(WorkerError):  # who calls next is told
                self._send(None)
            self._is_open = False

    def _expect_end(self, what: str, timeout_s: float) -> None:
        while self._receive(what, timeout_s)[0] != "end":
            pass

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message)
        try:
            self._move(self._connection.send_bytes, data)
        except BlockingIOError as error:
            raise self._child.late("a message to it", self._silence_s) from error
        except OSError as error:
            raise self._child.died("before it was called") from error

    def _receive(self, what: str, timeout_s: float) -> tuple[str, Any]:
        """("item" or "end", value). What comes of a call that was given up is a sign of life."""
        try:
            if not self._connection.poll(timeout_s):
                raise self._child.late(what, timeout_s)
            data = self._move(self._connection.recv_bytes)
        except BlockingIOError as error:  # half of it came
            raise self._child.late(what, self._silence_s) from error
        except (EOFError, OSError) as error:
            raise self._child.died(f"during {what}") from error
        number, kind, value = pickle.loads(data)
        if number != self._number:
            return "item", None
        self._is_open = kind == "item"
        if kind == "raised":
            raise WorkerError(self._child.label, value)
        return kind, value

    def _move(self, move: Callable[..., Any], *data: bytes) -> Any:
        """Move a message over the pipe. Interrupted, it may be there in part, and nothing after it could be read: the child is ended."""
        try:
            return move(*data)
        except (EOFError, OSError):
            raise
        except BaseException:
            self._child.close()
            raise


class Exchange:
    """A call of a method that goes on until `close`: messages to it, values from it. Not for several threads at once."""

    def __init__(self, process: EngineProcess, method: str, *args: Any) -> None:
        self._process = process
        self._what = f"{method}()"
        process._begin(method, args)
        self._heard = time.monotonic()
        self._is_over = False

    def send(self, message: Any) -> None:
        """The generator gets it where it yields next. Raises WorkerDied."""
        self._heard = time.monotonic()  # it may have been idle, which is silence too
        self._process._send(message)

    def receive(self, timeout_s: float | None) -> Any:
        """What it yields next, or None after `timeout_s`. Called while it has something to do. Raises as `EngineProcess.stream` does."""
        process = self._process
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            silent = self._heard + process._silence_s
            wait = max(0.0, min(silent, deadline or silent) - time.monotonic())
            if deadline is not None and deadline < silent and not process._connection.poll(wait):
                return None
            try:
                _, value = process._receive(self._what, wait)
            except BaseException:
                self._is_over = True
                raise
            self._heard = time.monotonic()
            if value is not None:
                return value

    def close(self) -> None:
        """End the call; what it yields until then is lost. Nobody waits for that once it has raised, or the child is gone."""
        process = self._process
        try:
            if not self._is_over and not process.has_ended:
                process._send(None)
                process._expect_end(self._what, process._silence_s)
        finally:
            process._leave()


def _limit(connection: Connection, silence_s: float) -> None:
    """A message that goes no further for so long is a BlockingIOError."""
    seconds, rest = divmod(silence_s, 1)
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            pipe.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(rest * 1e6)))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- the child ---------------------------------------------------------------------------------------------------------------


def serve() -> None:
    """The child's program: build the target, then answer calls until the parent closes the pipe."""
    connection = Connection(int(sys.argv[1]))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    path, options = inbox.get()
    module, _, name = path.partition(":")
    try:
        target = getattr(importlib.import_module(module), name)(**options)
    except Exception:
        _answer(connection, 0, "raised", traceback.format_exc())
        return
    _answer(connection, 0, "end", None)
    while True:
        call = inbox.get()
        if isinstance(call, _Call):  # anything else was sent to one that had ended
            number, method, args = call
            try:
                _run(connection, inbox, number, getattr(target, method)(*args))
                _answer(connection, number, "end", None)
            except Exception:
                _answer(connection, number, "raised", traceback.format_exc())


def _run(
    connection: Connection, inbox: queue.SimpleQueue[Any], number: int, values: Generator[Any, list[Any] | None, None]
) -> None:
    sent = time.monotonic()
    messages: list[Any] | None = None
    with contextlib.closing(values):
        while True:
            try:
                value = values.send(messages)
            except StopIteration:
                return
            if value is not IDLE and (value is not None or time.monotonic() - sent > _BEAT_S):
                _answer(connection, number, "item", value)
                sent = time.monotonic()
            messages = [inbox.get()] if value is IDLE else []
            while None not in messages[-1:] and not inbox.empty():  # what follows None is the next call
                messages.append(inbox.get())
            if None in messages[-1:]:
                return


def _read(connection: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        os._exit(1)


def _answer(connection: Connection, number: int, kind: str, value: Any) -> None:
    connection.send_bytes(pickle.dumps((number, kind, value)))
