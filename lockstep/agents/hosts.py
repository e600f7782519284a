"""Hosts: where an environment lives. In a process of its own that is killed at a deadline, in this one's threads, or in an event loop.

```text
process  a class that another process can find, with plain methods: whatever it does, it ends at its deadline
loop     a class with async methods: many share one event loop
thread   anything else (a class of the running script, a closure): what hangs is left behind
```
"""

import asyncio
import functools
import inspect
import math
import numbers
import reprlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from lockstep.agents.environment import Action, Environment, Turn
from lockstep.errors import RewardError
from lockstep.rewards.killable import KillableWorker, is_portable

Make = Callable[..., Environment]
Call = Callable[[dict[str, Environment]], Any]
"""Made where the environment lives, with what is held there."""


class EnvironmentFailed(RewardError):
    """An environment raised, hung, died, or returned something that is not a Turn."""


class Host(ABC):
    """Holds one environment at a time. Every call has a deadline; all raise EnvironmentFailed."""

    seconds: float = 0.0
    """Spent in the environment since `begin`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def begin(self, make: Make, kwargs: dict[str, Any], row: dict[str, Any], seed: int) -> Turn:
        """A new environment's first turn."""
        self.seconds = 0.0
        return self._timed(functools.partial(begin, make, kwargs, row, seed))

    def step(self, action: Action) -> Turn:
        """What follows the policy's turn."""
        return self._timed(functools.partial(step, action))

    def end(self) -> None:
        """Close the environment; what goes wrong then no longer matters."""
        try:
            self._call(end)
        except EnvironmentFailed:
            self.close()

    def _timed(self, call: Call) -> Turn:
        started = time.monotonic()
        try:
            turn = self._call(call)
        finally:
            self.seconds += time.monotonic() - started
        _check(turn)
        return turn

    @abstractmethod
    def _call(self, call: Call) -> Any:
        """Make a call where the environment lives."""

    def close(self) -> None:
        """Give up what the host holds."""
        return


class ProcessHost(Host):
    """In a process of its own."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._worker = KillableWorker()

    def begin(self, make: Make, kwargs: dict[str, Any], row: dict[str, Any], seed: int) -> Turn:
        """See Host. Files of the user are imported there first: their names mean nothing to another process."""
        tools = [getattr(each, "function", None) for value in kwargs.values() if isinstance(value, list) for each in value]
        with _failures():
            for needed in (make, *(tool for tool in tools if tool is not None and is_portable(tool))):
                self._worker.load(needed)
        return super().begin(make, kwargs, row, seed)

    def _call(self, call: Call) -> Any:
        with _failures():
            return self._worker.call(_in_child, self._timeout_s, call=call)

    def close(self) -> None:
        self._worker.close()


class ThreadHost(Host):
    """In a thread of this process; async methods get an event loop that all calls of one environment share."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._held: dict[str, Environment] = {}

    def _call(self, call: Call) -> Any:
        result: Future[Any] = Future()
        held = self._held

        def work() -> None:
            try:
                value = call(held)
                result.set_result(asyncio.run(_await(value)) if inspect.isawaitable(value) else value)
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=work, name="environment", daemon=True).start()
        return self._wait(result)

    def _wait(self, result: Future[Any]) -> Any:
        try:
            return result.result(self._timeout_s)
        except TimeoutError as error:
            if result.done():
                raise EnvironmentFailed(f"the environment raised {error!r}") from error
            self._held = {}
            raise EnvironmentFailed(f"the environment did not answer within {self._timeout_s:g} s; it was left behind") from error
        except BaseException as error:
            raise EnvironmentFailed(f"the environment raised {type(error).__name__}: {error}") from error


class LoopHost(ThreadHost):
    """In an event loop that all hosts share."""

    def _call(self, call: Call) -> Any:
        return self._wait(asyncio.run_coroutine_threadsafe(_awaited(call, self._held), _loop()))


@contextmanager
def _failures() -> Iterator[None]:
    """Whatever goes wrong with another process is the environment's failure."""
    try:
        yield
    except RewardError as error:
        raise EnvironmentFailed(str(error)) from error
    except Exception as error:  # this process cannot read what the other has sent
        raise EnvironmentFailed(f"what the environment returned cannot be read here: {type(error).__name__}: {error}") from error


def make_host(make: Make, timeout_s: float) -> Host:
    """The host that suits a class of environments."""
    methods = (getattr(make, name, None) for name in ("reset", "step", "close"))
    if any(inspect.iscoroutinefunction(method) for method in methods):
        return LoopHost(timeout_s)
    is_quick = getattr(make, "is_quick", False)
    return ProcessHost(timeout_s) if is_portable(make) and not is_quick else ThreadHost(timeout_s)


def _check(turn: Any) -> None:
    """Raises EnvironmentFailed, saying what is expected, for what is not a whole Turn."""
    if not isinstance(turn, Turn):
        raise EnvironmentFailed(f"an environment must return a Turn, not {_short(turn)}")
    reward = turn.reward
    if reward is not None and not (isinstance(reward, numbers.Real) and math.isfinite(reward)):
        raise EnvironmentFailed(f"the reward of a Turn must be a finite number or None, not {_short(reward)}")
    if not isinstance(turn.info, dict):
        raise EnvironmentFailed(f"the info of a Turn must be a dict, not {_short(turn.info)}")
    for message in turn.messages if isinstance(turn.messages, list | tuple) else [turn.messages]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise EnvironmentFailed(f"the messages of a Turn must be a list of dicts with role and content, not {_short(message)}")
        content = message.get("content")
        if not isinstance(content, str | list):
            raise EnvironmentFailed(f"the content of a message must be text, not {_short(content)}")
        try:
            str(content).encode()
        except UnicodeEncodeError as error:
            raise EnvironmentFailed(f"the content of a message is not valid Unicode: {error.reason}") from None


def _short(value: Any) -> str:
    """A value as text, however large it is."""
    return reprlib.repr(value)[:200]


# -- the calls, made where the environment lives -----------------------------------------------------------------------------


def begin(make: Make, kwargs: dict[str, Any], row: dict[str, Any], seed: int, held: dict[str, Environment]) -> Any:
    """Make the environment and reset it."""
    held["environment"] = make(**kwargs)
    return held["environment"].reset(row, seed)


def step(action: Action, held: dict[str, Environment]) -> Any:
    """Let the environment answer."""
    return held["environment"].step(action)


def end(held: dict[str, Environment]) -> Any:
    """Close the environment, if there is one."""
    environment = held.pop("environment", None)
    return environment.close() if environment is not None else None


_held: dict[str, Environment] = {}
"""The environment of a process of its own."""


def _in_child(call: Call) -> Any:
    return call(_held)


async def _await(value: Any) -> Any:
    return await value


async def _awaited(call: Call, held: dict[str, Environment]) -> Any:
    value = call(held)
    return await value if inspect.isawaitable(value) else value


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop
