"""Call functions in a child process that can be killed at a deadline.

A thread cannot be stopped, and a regular expression that backtracks holds the interpreter and so every other thread. Calls that may hang
run here instead: in a fresh interpreter (not a fork, which would copy locks and GPU handles) that is started once and serves many calls.

```text
parent: KillableWorker.call -> frame (function, arguments) -> child: load the function, call it -> frame (value or traceback) -> parent
deadline passed -> the child's guard kills the child and every process that it started; the next call starts a new child
```

`child.py` is the program of the child and `guard.py` the process that ends its descendants. Reward functions, environments, the symbolic
part of the MATH grader and `lockstep rewards check` use this module. Four other protocols remain, because each needs what this one must
not have:

- `judging/sandbox/{program,wire}.py` read answers of hostile programs: text frames without pickle, in files small enough to review.
- `backends/process.py` holds an inference engine: a call is a stream of values with messages in both directions, and its deadline is a
  time of silence, not of the whole call.
- `checkpoint/write_child.py` writes files that its parent has opened, at a low priority and without importing any package, and survives
  the signals that end the parent.
- `single_controller/base/channel.py` carries news between machines over an authenticated socket.
"""

import atexit
import contextlib
import functools
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from lockstep.errors import RewardError
from lockstep.processes.child import HEADER, MARK, FunctionReference

START_S = 600.0
"""For starting the child and for each import in it: on a loaded machine, many children that import large packages take minutes."""
_END_S = 10.0
_PROGRAM = (
    "import json, sys; sys.path[:], limit = json.loads(sys.argv.pop())\nfrom lockstep.processes.child import serve; serve(limit)"
)


class CallError(RewardError):
    """A call that has no value. `kind` is one of `lockstep.rewards.outcome.FAILURE_KINDS`."""

    kind: str


class CallTimeout(CallError):
    """The call did not end before its deadline, and its process was killed."""

    kind = "timeout"


class CallFailed(CallError):
    """The function raised (the message ends with the traceback), or its value cannot be sent back."""

    kind = "raised"


class CallCrashed(CallError):
    """The process ended during the call."""

    kind = "crashed"


def is_portable(function: Callable[..., Any]) -> bool:
    """Return whether another process can import the function: it is defined at the top of a module that is not the running script."""
    try:
        _reference(function)
    except ValueError:
        return False
    return True


class KillableWorker:
    """One child process, which the first call starts, and the next call after it was killed. Any thread may call; calls run one at a time.

    The child and each process that it starts may use `max_memory_mb` of memory; None sets no limit.
    """

    def __init__(self, max_memory_mb: int | None = None) -> None:
        self._lock = threading.Lock()
        self._max_memory_mb = max_memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._loaded: set[FunctionReference] = set()

    def call(self, function: Callable[..., Any], timeout_s: float, **kwargs: Any) -> Any:
        """Return `function(**kwargs)`, computed in the child. The deadline starts when the child has imported the function's module.

        Raise CallTimeout, CallFailed or CallCrashed, and ValueError if the function is not portable (see `is_portable`).
        """
        reference = _reference(function)
        try:
            arguments = pickle.dumps(kwargs, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise CallFailed(f"the arguments of {function_name(function)} cannot be sent to another process: {error}") from error
        with self._lock:
            self._load(reference, function)
            return self._exchange(reference, arguments, timeout_s, function_name(function))

    def load(self, function: Callable[..., Any]) -> None:
        """Start the child and import the function's module there, unless that has been done. Raise as `call` does."""
        with self._lock:
            self._load(_reference(function), function)

    @property
    def is_running(self) -> bool:
        """Whether a child exists, so that the next call need not start one."""
        return self._process is not None and self._owner == os.getpid()

    def close(self) -> None:
        """Kill the child, whatever it is doing."""
        with self._lock:
            self._kill()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._kill()

    def _load(self, reference: FunctionReference, function: Callable[..., Any]) -> None:
        # A forked copy of this object must not talk to the other process's child.
        if self._process is None or self._owner != os.getpid():
            self._process = _spawn(self._max_memory_mb)
            self._owner = os.getpid()
            self._loaded.clear()
        if reference not in self._loaded:
            self._exchange(reference, None, START_S, f"importing {function_name(function)}")
            self._loaded.add(reference)

    def _exchange(self, reference: FunctionReference, arguments: bytes | None, timeout_s: float, what: str) -> Any:
        assert self._process is not None
        try:
            status, value = _ask(self._process, (reference, arguments), time.monotonic() + timeout_s)
        except TimeoutError as error:
            self._kill()
            raise CallTimeout(f"{what} did not end within {timeout_s:g} s and was killed") from error
        except (EOFError, OSError) as error:
            time.sleep(0.05)  # its pipes close a moment before it has an exit code
            code = self._kill()
            number = -code if code and code < 0 else code - 128 if code and code > 128 else 0
            how = f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"
            raise CallCrashed(f"the process of {what} ended during the call ({how})") from error
        except BaseException:
            self._kill()  # an answer that was not read would be taken for the next one
            raise
        if status == "raised":
            raise CallFailed(f"{what} raised\n{value}")
        return value

    def _kill(self) -> int | None:
        """Kill the child and its descendants; return its exit code, or None if this process has no child."""
        process = self._process
        self._process = None
        if process is None or self._owner != os.getpid():
            return None
        code = _end(process)
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        _alive.discard(process)
        return code


def _ask(process: subprocess.Popen[bytes], request: object, deadline: float) -> tuple[str, Any]:
    """Return the child's answer. Raise TimeoutError at the deadline, EOFError or OSError if the child has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    unsent = memoryview(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
    while unsent:  # a child that an earlier call keeps busy reads nothing, and a pipe holds little
        _wait(process.stdin, select.POLLOUT, deadline)
        unsent = unsent[os.write(process.stdin.fileno(), unsent) :]
    read = bytearray()
    while len(read) < HEADER.size or len(read) < HEADER.size + HEADER.unpack_from(read)[0]:
        _wait(process.stdout, select.POLLIN, deadline)
        chunk = os.read(process.stdout.fileno(), 1 << 20)
        if not chunk:
            raise EOFError
        read += chunk
    answer: tuple[str, Any] = pickle.loads(read[HEADER.size :])
    return answer


def _wait(pipe: IO[bytes], event: int, deadline: float) -> None:
    """Wait until the pipe is ready. Raise TimeoutError at the deadline."""
    poller = select.poll()  # unlike select.select, not limited to the first 1024 descriptors
    poller.register(pipe, event)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


_alive: set[subprocess.Popen[bytes]] = set()
_spawner_lock = threading.Lock()


@functools.cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    """Return a thread that lives as long as this process (`pid`): a child asks to be killed when the thread that started it ends."""
    return ThreadPoolExecutor(1, "killable-spawner")


def _spawn(max_memory_mb: int | None) -> subprocess.Popen[bytes]:
    with _spawner_lock:
        spawner = _spawner(os.getpid())
    process = spawner.submit(
        subprocess.Popen,
        [sys.executable, "-c", _PROGRAM, json.dumps([[path for path in sys.path if path], max_memory_mb])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {MARK: str(os.getpid())},
        start_new_session=MARK not in os.environ,
    ).result()
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    _alive.add(process)
    return process


def _end(process: subprocess.Popen[bytes]) -> int:
    """Make the guard end the child and its descendants; return the exit code, which is the child's own if it had already ended."""
    with contextlib.suppress(OSError):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_END_S)
        if MARK in os.environ:
            process.kill()  # our group is that of the caller, which ends it as a whole
        else:
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


@atexit.register
def _end_all() -> None:
    for process in list(_alive):
        _end(process)


def function_name(function: Any) -> str:
    """Return the user's name of a function, also of a partial one: module.name, or file.py:name for a file of the configuration."""
    while hasattr(function, "func"):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", "?")
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "?")
    # utils/files.py gives the module of such a file a name that no other file has.
    is_named_file = module.startswith(f"{file.stem}_") and "." not in module
    return f"{file.name}:{name}" if is_named_file else f"{module}.{name}"


def _reference(function: Callable[..., Any]) -> FunctionReference:
    """Return the function as the child can find it. Raise ValueError if it cannot."""
    modules: dict[str, str | None] = {}
    try:
        # Functions may be wrapped several times: a call for a batch, around reward_kwargs, around the user's function.
        parts: list[Any] = [function]
        while hasattr(parts[-1], "func"):
            parts.append(parts[-1].func)
        for part in (*parts, *map(type, parts)):
            name = getattr(part, "__module__", None)
            if name == "__main__":
                raise pickle.PicklingError("it is defined in the running script")
            if name in sys.modules and name != "builtins":
                modules[name] = getattr(sys.modules[name], "__file__", None)
        return FunctionReference(pickle.dumps(function), tuple(modules.items()))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{function!r} cannot be found by another process ({error}): define it at the top of a module") from error
