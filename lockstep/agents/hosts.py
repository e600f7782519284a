"""Hosts: an environment lives in a process that is killed at a deadline, in a thread of this process, or in an event loop.

```text
process  a class that another process can import, with plain methods: whatever it does, it ends at its deadline
loop     a class with async methods: many share one event loop; a call that hangs is cancelled
thread   any other class (of the running script, a closure): a call that hangs is left behind
```
"""

import asyncio
import functools
import inspect
import json
import math
import numbers
import os
import queue
import reprlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any

from lockstep.agents.environment import Action, Environment, Message, Turn
from lockstep.agents.tools import learn_schemas, schemas_of
from lockstep.errors import RewardError
from lockstep.processes import START_S, KillableWorker, is_portable
from lockstep.utils.loop_thread import LoopThread

Make = Callable[..., Environment]
_MAX_FLOAT32 = 3.4028234663852886e38


class LiveEnvironment:
    """An environment and its event loop, in the process where the environment lives."""

    environment: Environment | None = None
    """Between `begin` and `end`."""
    runner: asyncio.Runner | None = None
    """The environment's own event loop, made when it is first needed: connections of one call serve the next. None if it shares a loop."""
    loop: LoopThread | None = None
    """The loop that it shares with other environments."""
    task: "asyncio.Task[Any] | None" = None
    """The call that runs in the shared loop."""


Call = Callable[[LiveEnvironment], Any]
"""Runs where the environment lives."""


class EnvironmentFailed(RewardError):
    """An environment raised, hung, died, or returned something that is not a Turn."""


class EnvironmentCall:
    """A call of an environment's method. Await it in a coroutine of an EpisodeLoop, or wait for `result` in a thread."""

    def __init__(self, host: "Host", future: "Future[Any]", timeout_s: float | None, counts: bool = True) -> None:
        """`counts`: whether the call's seconds are added to the environment's."""
        self.future = host.last = future
        self._counts = counts
        self._host = host
        self._started = time.monotonic()
        self._timeout_s = timeout_s
        self._ended: float | None = None
        self.deadline = None if timeout_s is None else self._started + timeout_s
        """When the wait for it ends; None if the host ends the call itself."""
        future.add_done_callback(self._note_end)

    @property
    def seconds(self) -> float:
        """Duration of the call so far."""
        return (self._ended or time.monotonic()) - self._started

    def _note_end(self, _: object) -> None:
        self._ended = time.monotonic()

    def __await__(self) -> "Generator[EnvironmentCall, None, Any]":
        yield self
        return self.result()

    def result(self) -> Any:
        """Wait, and return the environment's value. Raise EnvironmentFailed."""
        try:
            error = self.future.exception(None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
        except TimeoutError as late:
            self._host.leave_behind()
            raise EnvironmentFailed(f"the environment did not answer within {self._timeout_s:g} s; it was left behind") from late
        except CancelledError as cancelled:  # by the environment: nothing here cancels it
            raise EnvironmentFailed("the environment's call was cancelled") from cancelled
        finally:
            if self._counts:
                self._host.seconds += self.seconds
        if error is None:
            return self.future.result()
        if isinstance(error, EnvironmentFailed):
            raise error
        raise EnvironmentFailed(f"the environment raised {type(error).__name__}: {error}") from error


class Host(ABC):
    """Holds one environment at a time. Every call has a deadline and raises EnvironmentFailed."""

    seconds: float = 0.0
    """Seconds spent in the environment since `begin`."""
    last: "Future[Any] | None" = None
    """The last call."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def starting(self, make: Make, kwargs: dict[str, Any]) -> EnvironmentCall | None:
        """Start the process that `make(**kwargs)` needs; wait for it before `beginning`. None if no process is needed.

        The start has no deadline and does not count as seconds of the environment: its duration depends on the load of the machine.
        """
        return None

    def beginning(self, make: Make, kwargs: dict[str, Any], row: dict[str, Any], seed: int) -> EnvironmentCall:
        """Make an environment and return its first turn; check it with `check_turn`."""
        self.seconds = 0.0
        return self._made(functools.partial(begin, make, kwargs, row, seed))

    def stepping(self, action: Action) -> EnvironmentCall:
        """Return the answer to the policy's turn; check it with `check_turn`."""
        return self._made(functools.partial(step, action))

    def ending(self) -> EnvironmentCall:
        """Close the environment."""
        return self._made(end)

    def begin(self, make: Make, kwargs: dict[str, Any], row: dict[str, Any], seed: int) -> Turn:
        """Wait for `starting` and `beginning`."""
        if (start := self.starting(make, kwargs)) is not None:
            start.result()
        return check_turn(self.beginning(make, kwargs, row, seed).result(), is_first=True)

    def step(self, action: Action) -> Turn:
        """Wait for `stepping`."""
        return check_turn(self.stepping(action).result())

    @abstractmethod
    def _made(self, call: Call) -> EnvironmentCall:
        """Start a call where the environment lives."""

    def leave_behind(self) -> None:
        """The environment hangs: close it when its call has returned, and call it no more."""
        return

    def abandon(self) -> None:
        """Give up in the middle of an episode: close the environment when its call has returned, and the host. Return at once."""
        self.ending()
        self.close(waits=False)

    def close(self, waits: bool = True) -> None:
        """Release the host's process and threads after its calls. The host can be used again."""
        return


class ProcessHost(Host):
    """Holds an environment in a process of its own, which a thread talks to."""

    _child: "_Child | None" = None
    _closing: "Future[Any] | None" = None

    def starting(self, make: Make, kwargs: dict[str, Any]) -> EnvironmentCall | None:
        """See Host. Imports files of the user in the process too, where their module names are unknown."""
        if self._child is None:
            self._child = _Child()
        tools = [getattr(each, "function", None) for value in kwargs.values() if isinstance(value, list) for each in value]
        needed = [make, *(tool for tool in tools if tool is not None and is_portable(tool))]
        return EnvironmentCall(
            self, self._child.put(functools.partial(self._child.start, make, kwargs, needed)), None, counts=False
        )

    def _made(self, call: Call) -> EnvironmentCall:
        if self._child is None:
            self._child = _Child()
        return EnvironmentCall(self, self._child.put(functools.partial(self._child.call, call, self._timeout_s)), None)

    def abandon(self) -> None:
        if self._child is not None:
            self._child.is_wanted = False
        super().abandon()

    def close(self, waits: bool = True) -> None:
        if self._child is not None:
            self._closing = self._child.put(None)
            self._child = None
        if waits and self._closing is not None:
            self._closing.result()


_starts = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))
"""Limits how many processes start at a time: more would only slow each other down and take the processors from the engine."""


class _Child:
    """A process and the thread that talks to it. The process is killed at the deadline of a call."""

    is_wanted = True
    """Whether a process may still be started."""

    def __init__(self) -> None:
        self._worker = KillableWorker()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any] | None, Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="environment", daemon=True).start()

    def put(self, call: Callable[[], Any] | None) -> "Future[Any]":
        """Queue a call for the thread; None ends the process and the thread."""
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def start(self, make: Make, kwargs: dict[str, Any], needed: Sequence[Callable[..., Any]]) -> None:
        """Start the process unless it runs, and import there what `make(**kwargs)` needs."""
        if self._worker.is_running:
            self._load(make, kwargs, needed)
            return
        with _starts:
            if not self.is_wanted:
                raise EnvironmentFailed("the episode was given up before the process of its environment was started")
            self._load(make, kwargs, needed)

    def _load(self, make: Make, kwargs: dict[str, Any], needed: Sequence[Callable[..., Any]]) -> None:
        with _failures():
            for each in needed:
                self._worker.load(each)
            # Unpickling the arguments imports modules, which must not count as part of the first call.
            self._worker.call(_in_child, START_S, call=functools.partial(prepare, schemas_of(make), kwargs))

    def call(self, call: Call, timeout_s: float) -> Any:
        """Make a call in the process, and return its value."""
        if call is end and not self._worker.is_running:
            return None
        with _failures():
            return self._worker.call(_in_child, timeout_s, call=call)

    def _serve(self) -> None:
        call: Callable[[], Any] | None = self._serve
        while call is not None:
            call, future = self._calls.get()
            _fulfil(future, call or self._worker.close)


class ThreadHost(Host):
    """Holds an environment in this process and makes each call in a thread."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._live = LiveEnvironment()

    def beginning(self, make: Make, kwargs: dict[str, Any], row: dict[str, Any], seed: int) -> EnvironmentCall:
        """See Host."""
        self._live = LiveEnvironment()
        return super().beginning(make, kwargs, row, seed)

    def _made(self, call: Call) -> EnvironmentCall:
        return EnvironmentCall(self, _in_thread(call, self._live), self._timeout_s)

    def leave_behind(self) -> None:
        live = self._live
        self._live = LiveEnvironment()
        if self.last is not None:
            self.last.add_done_callback(lambda _: _in_thread(end, live))

    def abandon(self) -> None:
        if self.last is not None:
            self.last.add_done_callback(lambda _: self.ending())


class LoopHost(ThreadHost):
    """Holds an environment in an event loop that hosts share. A loop that an environment blocks gets no new environments."""

    def _made(self, call: Call) -> EnvironmentCall:
        if self._live.loop is None:
            self._live.loop = _free_loop()
        return EnvironmentCall(self, self._live.loop.submit(_awaited(call, self._live)), self._timeout_s)

    def leave_behind(self) -> None:
        live = self._live
        self._live = LiveEnvironment()
        if live.loop is not None:
            live.loop.submit(_end_late(live))


_BEAT_S = 0.25
_PATIENCE_S = 1.0
_MOMENT_S = 0.05
_loops: list[LoopThread] = []
"""The loops that async environments share, the newest first."""
_loops_lock = threading.Lock()


def _free_loop() -> LoopThread:
    """Return a loop that no environment blocks; start one if all are blocked."""
    with _loops_lock:
        for loop in _loops:
            # A silent loop may only have waited for the interpreter, which this thread has held.
            if loop.silent_s <= _PATIENCE_S or loop.answers(within_s=_MOMENT_S):
                return loop
        _loops.insert(0, LoopThread("environments", _BEAT_S))
        return _loops[0]


def _in_thread(call: Call, live: LiveEnvironment) -> "Future[Any]":
    """Start a call in a thread of its own."""
    future: Future[Any] = Future()
    threading.Thread(target=_fulfil, args=(future, functools.partial(_called, call, live)), name="environment", daemon=True).start()
    return future


def _fulfil(future: "Future[Any]", call: Callable[[], Any]) -> None:
    try:
        value = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(value)


@contextmanager
def _failures() -> Iterator[None]:
    """Turn every error of the other process into EnvironmentFailed."""
    try:
        yield
    except RewardError as error:
        raise EnvironmentFailed(str(error).replace(f"{__name__}.{_in_child.__name__}", "the environment")) from error
    except Exception as error:  # this process cannot unpickle the answer
        raise EnvironmentFailed(f"what the environment returned cannot be read here: {type(error).__name__}: {error}") from error


def make_host(make: Make, timeout_s: float) -> Host:
    """Return a host for a class of environments."""
    methods = (getattr(make, name, None) for name in ("reset", "step", "close"))
    if any(inspect.iscoroutinefunction(method) for method in methods):
        return LoopHost(timeout_s)
    if getattr(make, "is_quick", False):
        return ThreadHost(timeout_s + getattr(make, "queue_s", 0.0))
    return ProcessHost(timeout_s) if is_portable(make) else ThreadHost(timeout_s)


def check_turn(turn: Any, is_first: bool = False) -> Turn:
    """Convert a turn's numbers to Python's and its info to JSON values, in place, so that a replay reads what was recorded; return it.
    `is_first`: the turn is the result of `reset`.

    Raise EnvironmentFailed, with the expected form, for an invalid turn.
    """
    if not isinstance(turn, Turn):
        raise EnvironmentFailed(f"an environment must return a Turn, not {_short(turn)}")
    reward = turn.reward
    if reward is not None and not (isinstance(reward, numbers.Real) and _is_finite(reward)):
        raise EnvironmentFailed(f"the reward of a Turn must be a finite number or None, not {_short(reward)}")
    if not isinstance(turn.info, dict):
        raise EnvironmentFailed(f"the info of a Turn must be a dict, not {_short(turn.info)}")
    given = turn.messages if isinstance(turn.messages, list | tuple) else [turn.messages]
    messages = [_check_message(message) for message in given]
    try:
        done = bool(turn.done)
        faults = int(turn.faults)
        info = json.loads(json.dumps(turn.info, default=_as_json, allow_nan=False), parse_int=_int)
    except (TypeError, ValueError, OverflowError, RecursionError, RuntimeError) as error:
        # A tensor of several numbers, a circle, a key that is no text, a number that is not finite.
        raise EnvironmentFailed(f"a Turn's done must be true or false, and its info JSON: {error}") from None
    if is_first and (not messages or done or reward):
        raise EnvironmentFailed(
            "reset must return the first messages, without a reward and not done: the policy has said nothing yet"
        )
    # In place: the call's future holds the turn, which may be large until it is cut.
    turn.messages = messages
    turn.reward = None if reward is None else float(reward)
    turn.done = done
    turn.info = info
    turn.faults = faults
    return turn


def _is_finite(reward: Any) -> bool:
    """Return whether the reward is finite in float32, in which it is trained with."""
    try:
        return abs(float(reward)) <= _MAX_FLOAT32
    except OverflowError:  # an int or a fraction beyond floats
        return False


def _int(text: str) -> int:
    """Return an integer of an info, whose mean over episodes is a float. Raise ValueError if it is too large."""
    if math.isinf(float(text)):
        raise ValueError("an integer in it is too large for a float")
    return int(text)


def _check_message(message: Any) -> Message:
    """Return the message with its content as one text; some APIs split it into parts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise EnvironmentFailed(f"the messages of a Turn must be a list of dicts with role and content, not {_short(message)}")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else content
    if not isinstance(content, str):
        raise EnvironmentFailed(f"the content of a message must be text, not {_short(content)}")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFailed(f"the content of a message is not valid Unicode: {error.reason}") from None
    return message | {"content": content}


def _as_json(value: Any) -> Any:
    """Return a value that JSON cannot hold as a number (NumPy, PyTorch) or as text."""
    try:
        return value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return _short(value)


def _short(value: Any) -> str:
    """Return a value as text of bounded length."""
    return reprlib.repr(value)[:200]


# -- the calls, which run where the environment lives ---------------------------------------------------------------------------


def prepare(schemas: Mapping[tuple[str, str], dict[str, Any]], kwargs: dict[str, Any], live: LiveEnvironment) -> None:
    """Make the first call in a process: unpickling its `kwargs` has imported what they need."""
    learn_schemas(schemas)


def begin(make: Make, kwargs: dict[str, Any], row: dict[str, Any], seed: int, live: LiveEnvironment) -> Any:
    """Make the environment and reset it."""
    live.environment = make(**kwargs)
    return live.environment.reset(row, seed)


def step(action: Action, live: LiveEnvironment) -> Any:
    """Return the environment's answer."""
    assert live.environment is not None
    return live.environment.step(action)


def end(live: LiveEnvironment) -> Any:
    """Close the environment, if there is one."""
    environment = live.environment
    live.environment = None
    return environment.close() if environment is not None else None


_live = LiveEnvironment()
"""The environment of this process, if the process belongs to one."""


def _in_child(call: Call) -> Any:
    return _called(call, _live)


def _called(call: Call, live: LiveEnvironment) -> Any:
    """Make a call in this thread. An awaitable runs in the environment's own event loop, which ends with the environment."""
    try:
        value = call(live)
        if not inspect.isawaitable(value):
            return value
        live.runner = live.runner or asyncio.Runner()
        return live.runner.run(_await(value))
    finally:
        if live.environment is None and live.runner is not None:
            live.runner.close()
            live.runner = None


async def _await(value: Any) -> Any:
    return await value


async def _awaited(call: Call, live: LiveEnvironment) -> Any:
    """Make a call in the event loop that runs this."""
    live.task = asyncio.current_task()
    try:
        value = call(live)
        return await value if inspect.isawaitable(value) else value
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the event loop of all environments
        raise EnvironmentFailed(f"the environment raised {type(error).__name__}: {error}") from error


async def _end_late(live: LiveEnvironment) -> None:
    """Cancel a late call, and close its environment when it has ended. A late call of `close` itself is not cancelled."""
    if live.environment is not None and live.task is not None:
        live.task.cancel()
        await asyncio.wait({live.task})
        await _awaited(end, live)
