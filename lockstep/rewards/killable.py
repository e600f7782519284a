"""A Python process that calls functions for us and can be killed at a deadline, whatever they do.

A thread cannot be stopped, and a regular expression that back-tracks stops every other thread as well. So what may hang runs here: in a
fresh interpreter (not a fork, which would copy locks and GPU handles), loaded once and used for many calls.

```text
parent: KillableWorker.call -> frame (function, arguments) -> child: load the function, call it -> frame (value or traceback) -> parent
deadline passed -> SIGKILL to the child's process group; the next call starts a new child
```
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

from lockstep.errors import RewardError

_HEADER = struct.Struct("!Q")
_MARK = "LOCKSTEP_KILLABLE_CHILD"
_START_S = 120.0
_PR_SET_PDEATHSIG = 1
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from lockstep.rewards.killable import serve; serve()"


class CallError(RewardError):
    """A call without a value; `kind` is one of outcome.FAILURE_KINDS."""

    kind: str


class CallTimeout(CallError):
    """The call did not end before its deadline; its process was killed."""

    kind = "timeout"


class CallFailed(CallError):
    """The function raised, or its value cannot be sent back; the message ends with the traceback."""

    kind = "raised"


class CallCrashed(CallError):
    """The process ended during the call."""

    kind = "crashed"


@dataclass(frozen=True, slots=True)
class _Function:
    """A function as the child can find it again."""

    pickled: bytes
    modules: tuple[tuple[str, str | None], ...]
    """Name and file of the modules that define it: the name may mean nothing to another process."""


def is_portable(function: Callable[..., Any]) -> bool:
    """Whether another process can find the function: it is defined at the top of a module that is not the running script."""
    try:
        _portable(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


class KillableWorker:
    """One child process. Calls are made one at a time, in any thread. It is started by the first call and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._buffer = bytearray()
        self._loaded: set[_Function] = set()

    def call(self, function: Callable[..., Any], timeout_s: float, **kwargs: Any) -> Any:
        """`function(**kwargs)`, computed in the child.

        The deadline starts when the child has imported the function's module. Raises CallTimeout, CallFailed, CallCrashed, and ValueError
        for a function that `is_portable` refuses.
        """
        reference = _reference(function)
        try:
            arguments = pickle.dumps(kwargs, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise CallFailed(f"the arguments of {_name(function)} cannot be sent to another process: {error}") from error
        with self._lock:
            self._load(reference, function)
            return self._exchange(reference, arguments, timeout_s, _name(function))

    def load(self, function: Callable[..., Any]) -> None:
        """Start the child and import the function's module there, if that is still to be done. Raises as `call` does."""
        with self._lock:
            self._load(_reference(function), function)

    def close(self) -> None:
        """End the child, whatever it does."""
        with self._lock:
            if self._owner == os.getpid():
                self._kill()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if self._owner == os.getpid():
                self._kill()

    def _load(self, reference: _Function, function: Callable[..., Any]) -> None:
        # A forked copy of this object must not talk to the other process's child.
        if self._process is None or self._owner != os.getpid():
            self._start()
        if reference not in self._loaded:
            self._exchange(reference, None, _START_S, f"importing {_name(function)}")
            self._loaded.add(reference)

    def _start(self) -> None:
        self._buffer.clear()
        self._loaded.clear()
        self._process = _spawn()
        self._owner = os.getpid()
        _alive.add(self._process)

    def _exchange(self, reference: _Function, arguments: bytes | None, timeout_s: float, what: str) -> Any:
        try:
            self._send(pickle.dumps((reference, arguments), pickle.HIGHEST_PROTOCOL))
            status, value = pickle.loads(self._receive(time.monotonic() + timeout_s))
        except TimeoutError as error:
            self._kill()
            raise CallTimeout(f"{what} did not end within {timeout_s:g} s and was killed") from error
        except (EOFError, OSError) as error:
            time.sleep(0.05)  # its pipes close a moment before it has an exit code
            code = self._kill()
            raise CallCrashed(f"the process of {what} ended during the call ({_describe_exit(code)})") from error
        except BaseException:
            self._kill()  # an answer that was not read would be taken for the next one
            raise
        if status == "raised":
            raise CallFailed(f"{what} raised\n{value}")
        return value

    def _send(self, payload: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(_HEADER.pack(len(payload)) + payload)
        self._process.stdin.flush()

    def _receive(self, deadline: float) -> bytes:
        while True:
            if len(self._buffer) >= _HEADER.size:
                end = _HEADER.size + _HEADER.unpack_from(self._buffer)[0]
                if len(self._buffer) >= end:
                    payload = bytes(self._buffer[_HEADER.size : end])
                    del self._buffer[:end]
                    return payload
            assert self._process is not None
            assert self._process.stdout is not None
            poller = select.poll()  # unlike select.select, not limited to the first 1024 descriptors
            poller.register(self._process.stdout, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(self._process.stdout.fileno(), 1 << 20)
            if not chunk:
                raise EOFError
            self._buffer += chunk

    def _kill(self) -> int | None:
        """Kill the child and what it started; its exit code, or None when there was no child."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            # A process that has already ended keeps its own exit code, and its number until it is waited for.
            if _is_child():
                process.kill()  # our group is that of the caller, which kills it as a whole
            else:
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        _alive.discard(process)
        return code


_alive: set[subprocess.Popen[bytes]] = set()
_spawner: ThreadPoolExecutor | None = None
_spawner_owner = 0
_spawner_lock = threading.Lock()


def _spawn() -> subprocess.Popen[bytes]:
    """Start a child from a thread that lives as long as this process: the child asks to be killed when that thread ends."""
    global _spawner, _spawner_owner
    with _spawner_lock:
        if _spawner is None or _spawner_owner != os.getpid():
            _spawner, _spawner_owner = ThreadPoolExecutor(1, "killable-spawner"), os.getpid()
        spawner = _spawner
    return spawner.submit(
        subprocess.Popen,
        [sys.executable, "-c", _PROGRAM, json.dumps([path for path in sys.path if path])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {_MARK: str(os.getpid())},
        start_new_session=not _is_child(),
    ).result()


@atexit.register
def _end_children() -> None:
    for process in list(_alive):
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL) if _is_child() else os.killpg(process.pid, signal.SIGKILL)


def _is_child() -> bool:
    return _MARK in os.environ


def _name(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', type(inner).__name__)}"


def _reference(function: Callable[..., Any]) -> _Function:
    try:
        return _portable(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{function!r} cannot be found by another process ({error}): define it at the top of a module") from error


def _portable(function: Callable[..., Any]) -> _Function:
    """Raises PicklingError, AttributeError or TypeError for a function that another process cannot find."""
    modules = []
    for part in (function, getattr(function, "func", None), type(function)):
        name = getattr(part, "__module__", None)
        if name == "__main__":
            raise pickle.PicklingError(f"{_name(function)} is defined in the running script")
        if name is not None and name in sys.modules and name != "builtins":
            modules.append((name, getattr(sys.modules[name], "__file__", None)))
    return _Function(pickle.dumps(function), tuple(dict.fromkeys(modules)))


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "exit code unknown"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# -- the child ---------------------------------------------------------------------------------------------------------------


def serve() -> None:
    """The child's program: read a function with its arguments (None: only import it), answer ("ok", value) or ("raised", traceback).

    Ends when the parent closes the pipe.
    """
    _die_with_parent()
    # The function may print: what it writes to stdout goes to stderr, so that frames stay whole.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    functions: dict[_Function, Callable[..., Any]] = {}
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            reference, arguments = pickle.loads(_read_frame(requests))
            if arguments is None:
                _write_frame(answers, _answer(lambda reference=reference: functions.update({reference: _load(reference)}), None))
            else:
                _write_frame(answers, _answer(functions[reference], arguments))


def _answer(function: Callable[..., Any], arguments: bytes | None) -> bytes:
    try:
        value = function(**(pickle.loads(arguments) if arguments else {}))
        if inspect.isawaitable(value):
            import asyncio

            value = asyncio.run(_awaited(value))
        return pickle.dumps(("ok", value), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # SystemExit too: the function may call exit()
        tail = error.__traceback__.tb_next if error.__traceback__ is not None else None
        buffer = io.StringIO()
        traceback.print_exception(type(error), error, tail, file=buffer)
        return pickle.dumps(("raised", buffer.getvalue()))


async def _awaited(value: Any) -> Any:
    return await value


def _load(reference: _Function) -> Callable[..., Any]:
    for name, file in reference.modules:
        try:
            importlib.import_module(name)
        except ImportError:
            if file is None:
                raise
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None, file
            assert spec.loader is not None, file
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    function = pickle.loads(reference.pickled)
    assert callable(function), function
    return function


def _read_frame(stream: BinaryIO) -> bytes:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError
    return stream.read(_HEADER.unpack(header)[0])


def _write_frame(stream: BinaryIO, payload: bytes) -> None:
    stream.write(_HEADER.pack(len(payload)) + payload)
    stream.flush()


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends (Linux). Elsewhere a child that is idle ends with its pipe."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ[_MARK]:
        os._exit(1)
