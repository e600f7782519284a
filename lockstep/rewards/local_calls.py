"""Calls of reward functions that stay in this process: in threads, and in an event loop."""

import asyncio
import inspect
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from lockstep.processes import function_name
from lockstep.rewards.outcome import Failure, Outcome, check_score, raised

MAX_OPEN_CALLS = 64
_LOOP_PATIENCE_S = 2.0


def call_in_thread(timeout_s: float, function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
    """`function(**arguments)` in a thread of its own, which is left behind when it does not end in time."""
    outcome: list[Outcome] = []

    def work() -> None:
        try:
            value = function(**arguments)
            outcome.append(check_score(asyncio.run(value) if inspect.iscoroutine(value) else value))
        except BaseException as error:
            outcome.append(raised(error))

    thread = threading.Thread(target=work, name="reward", daemon=True)
    started = time.monotonic()
    thread.start()
    thread.join(timeout_s)
    late = Failure("timeout", f"{function_name(function)} did not end within {timeout_s:g} s; its thread was left behind")
    return replace(outcome[0] if outcome else late, seconds=time.monotonic() - started)


class EventLoops:
    """The event loop that async reward functions run in; it is replaced when a call blocks it. `close`, or the end of the last reference
    to this object, ends the loop as soon as its calls have ended."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None
        self._end: Any  # closes the loop, once

    def submit(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Future[Outcome]:
        """Start a call of an async function."""
        with self._lock:
            if self._loop is not None and self._loop.is_blocked():
                self._end()
                self._loop = None
            if self._loop is None:
                self._loop = EventLoop(self._timeout_s)
                self._end = weakref.finalize(self, self._loop.close)
                self._end.atexit = False
            return self._loop.submit(function, arguments)

    def close(self) -> None:
        """End the loop when the calls that were started have ended; later calls get another."""
        with self._lock:
            if self._loop is not None:
                self._end()
                self._loop = None


class EventLoop:
    """An event loop on a thread of its own. A second thread watches it: a call that blocks the loop past its deadline costs the calls
    beside it their answers, not the run.

    The loop ends only when every call has ended. A call that is left behind is ended by the garbage collector, in whichever thread that
    runs; one that catches this and tries again would keep the thread for ever.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._nap_s = min(0.5, timeout_s / 4)
        self._limit = asyncio.Semaphore(MAX_OPEN_CALLS)
        self._open: set[Future[Outcome]] = set()
        self._lock = threading.Lock()  # of `_open`: who takes a future out of it answers it
        self._calls: set[asyncio.Task[Outcome]] = set()  # asyncio itself keeps no task alive that waits
        self._seen = time.monotonic()
        threading.Thread(target=self._run, name="reward-loop", daemon=True).start()
        threading.Thread(target=self._watch, name="reward-loop-watch", daemon=True).start()

    def submit(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Future[Outcome]:
        """Start a call. Not after `close`."""
        future: Future[Outcome] = Future()
        with self._lock:
            self._open.add(future)
        asyncio.run_coroutine_threadsafe(self._call(future, function, arguments), self._loop)
        return future

    def is_blocked(self) -> bool:
        """Whether a call keeps the loop from running the others."""
        return time.monotonic() - self._seen > self._timeout_s + _LOOP_PATIENCE_S

    def close(self) -> None:
        """End the loop when the calls that were started have been answered, and those that were late have ended."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    def _run(self) -> None:
        self._loop.call_soon(self._tick)
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        while self._open:
            await asyncio.sleep(self._nap_s)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:  # late calls, and what calls have started and left
            task.cancel()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()

    async def _call(self, future: Future[Outcome], function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        async with self._limit:
            started = time.monotonic()
            task = asyncio.ensure_future(_outcome(function, arguments))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            # Not `wait_for`, which waits on for a call that catches its cancellation, as one does that tries again after any exception.
            ended, _ = await asyncio.wait({task}, timeout=self._timeout_s)
            late = Failure("timeout", f"{function_name(function)} did not end within {self._timeout_s:g} s and was cancelled")
            outcome = task.result() if ended else late
            task.cancel()
        self._settle(future, replace(outcome, seconds=time.monotonic() - started))

    def _settle(self, future: Future[Outcome], outcome: Outcome) -> None:
        with self._lock:
            is_open = future in self._open
            self._open.discard(future)
        if is_open:
            future.set_result(outcome)

    def _watch(self) -> None:
        """While a call blocks the loop, answer all that are open on it. The loop may go on afterwards, and be blocked again."""
        text = f"an async reward function blocks its event loop for more than {self._timeout_s:g} s: it must await, not wait"
        while not self._loop.is_closed():
            for future in list(self._open) if self.is_blocked() else ():
                self._settle(future, Failure("timeout", text))
            time.sleep(self._nap_s)

    def _tick(self) -> None:
        self._seen = time.monotonic()
        self._loop.call_later(self._nap_s, self._tick)


async def _outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
    try:
        return check_score(await function(**arguments))
    except BaseException as error:  # its own, or our cancelling, after which nobody reads this
        return raised(error)
