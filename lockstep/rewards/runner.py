"""RewardRunner: call reward functions in the background. Every call ends, at its deadline at the latest, in a score or a failure.

```text
process  a function that another process can import: killed at its deadline, whatever it does (see lockstep.processes)
thread   a function that exists only here (a lambda, a method, the running script) or takes the sandbox: left behind at its deadline
loop     an async function: many calls in one event loop, cancelled at their deadline
```

A call that hangs delays no other call.
"""

import asyncio
import functools
import heapq
import inspect
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from lockstep.config.reward import RewardConfig
from lockstep.processes import CallError, KillableWorker, function_name, is_portable
from lockstep.rewards.outcome import RETRIED_KINDS, Failure, Outcome, check_score, raised
from lockstep.utils.loop_thread import LoopThread

ComputeScore = Callable[..., Any]
"""(data_source=, solution_str=, ground_truth=, extra_info=) -> a number, or a dict with "score"; sync or async."""

_MAX_OPEN_CALLS = 64
_SANDBOXED_S = 600.0
_FIRST_WAIT_S = 1.0
"""Seconds before the first retry; each further wait is twice as long. A service that is overloaded needs time."""
_LONGEST_WAIT_S = 30.0
_LOOP_PATIENCE_S = 2.0


class _Lane(Protocol):
    """One way to make calls."""

    def submit(self, function: ComputeScore, arguments: dict[str, Any]) -> Future[Outcome]: ...

    def close(self) -> None: ...


class RewardRunner:
    """Calls reward functions. Processes, threads and the event loop are started by the first call that needs them. They end, after their
    calls, when the runner is closed or no longer referenced.

    Args:
        num_workers: Calls at once in processes, and as many in threads.
        timeout_s: Deadline of each call, from its own start.
        max_memory_mb: Memory of each process and of each of its child processes; None: no limit.
        retries: How often to repeat a call that raised, timed out or lost its process, after 1, 2, 4, ... s, at most 30 s. Each repeated
            call has a deadline of its own; a call that waits for its retry holds no process and no thread.
    """

    def __init__(
        self, num_workers: int, timeout_s: float, max_memory_mb: int | None = None, retries: int = RewardConfig.retries
    ) -> None:
        self.timeout_s = timeout_s
        self.retries = retries
        self._timer = _Timer()
        self._processes = _QueueLane(num_workers, timeout_s, in_process=True, max_memory_mb=max_memory_mb)
        self._threads = _QueueLane(num_workers, timeout_s)
        self._sandboxed = _QueueLane(_MAX_OPEN_CALLS, max(timeout_s, _SANDBOXED_S))
        self._loops = _LoopLane(timeout_s)
        weakref.finalize(self, _close, [self._processes, self._threads, self._sandboxed]).atexit = False

    def submit(self, function: ComputeScore, arguments: dict[str, Any]) -> Future[Outcome]:
        """Start `function(**arguments)` and return the future of its outcome.

        A function with an argument `sandbox` waits for programs there, which have deadlines of their own; the sandbox limits how many run
        at once.
        """
        lane = self._lane_of(function, arguments)
        if not self.retries:
            return lane.submit(function, arguments)
        outcome: Future[Outcome] = Future()
        self._try(outcome, lane, function, arguments, 0)
        return outcome

    def close(self) -> None:
        """End processes, threads and the event loop when the calls that were started have ended."""
        _close([self._processes, self._threads, self._sandboxed, self._loops])

    def _lane_of(self, function: ComputeScore, arguments: dict[str, Any]) -> _Lane:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            return self._loops
        if "sandbox" in arguments:
            return self._sandboxed
        if is_portable(function):
            return self._processes
        return self._threads

    def _try(
        self, outcome: Future[Outcome], lane: _Lane, function: ComputeScore, arguments: dict[str, Any], num_retries: int
    ) -> None:
        """Make the call, and again later if it fails and retries are left; set `outcome` after the last one."""

        def on_done(attempt: Future[Outcome]) -> None:
            result = replace(attempt.result(), num_retries=num_retries)
            if isinstance(result, Failure) and result.kind in RETRIED_KINDS and num_retries < self.retries:
                wait_s = min(_FIRST_WAIT_S * 2**num_retries, _LONGEST_WAIT_S)
                self._timer.call_later(wait_s, functools.partial(self._try, outcome, lane, function, arguments, num_retries + 1))
            else:
                outcome.set_result(result)

        try:
            attempt = lane.submit(function, arguments)
        except Exception as error:  # no thread could be started
            outcome.set_result(raised(error))
        else:
            attempt.add_done_callback(on_done)


def _close(lanes: list[_Lane]) -> None:
    for lane in lanes:
        lane.close()


class _Timer:
    """Calls functions later, in a thread that ends when nothing is left to wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._has_thread = False

    def call_later(self, wait_s: float, function: Callable[[], None]) -> None:
        """Call `function`, which must return at once and raise nothing, in `wait_s` seconds."""
        with self._changed:
            heapq.heappush(self._waiting, (time.monotonic() + wait_s, next(self._numbers), function))
            self._changed.notify()
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._serve, name="scoring-later", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while self._waiting and (left := self._waiting[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left)
                if not self._waiting:
                    self._has_thread = False
                    return
                _, _, function = heapq.heappop(self._waiting)
            function()
            del function  # it may hold the last reference to the runner


# -- synchronous functions ---------------------------------------------------------------------------------------------------


class _QueueLane:
    """Up to `width` threads that take calls from one queue. Each thread makes them in a worker process of its own, or in this process."""

    def __init__(self, width: int, timeout_s: float, in_process: bool = False, max_memory_mb: int | None = None) -> None:
        self._width = width
        self._timeout_s = timeout_s
        self._in_process = in_process
        self._max_memory_mb = max_memory_mb
        self._calls: queue.SimpleQueue[tuple[Future[Outcome], ComputeScore, dict[str, Any]] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._num_open = 0
        self._lock = threading.RLock()  # a thread that holds it may collect the runner, which closes this lane

    def submit(self, function: ComputeScore, arguments: dict[str, Any]) -> Future[Outcome]:
        """Queue a call."""
        future: Future[Outcome] = Future()
        with self._lock:
            if self._num_threads < min(self._width, self._num_open + 1):
                threading.Thread(target=self._serve, name="scoring", daemon=True).start()
                self._num_threads += 1
            self._num_open += 1
        self._calls.put((future, function, arguments))
        return future

    def close(self) -> None:
        """End the threads after the calls that are queued."""
        with self._lock:
            for _ in range(self._num_threads):
                self._calls.put(None)
            self._num_threads = 0

    def _serve(self) -> None:
        worker = KillableWorker(self._max_memory_mb)  # its first call starts the process
        while (queued := self._calls.get()) is not None:
            future, function, arguments = queued
            try:
                if self._in_process:
                    outcome = _call_in_process(worker, function, arguments, self._timeout_s)
                else:
                    outcome = _call_in_thread(function, arguments, self._timeout_s)
            except BaseException as error:
                outcome = raised(error)
            future.set_result(outcome)
            with self._lock:
                self._num_open -= 1
            del queued, future, function, arguments, outcome  # callbacks of the future may hold the last reference to the runner
        worker.close()


def _call_in_process(worker: KillableWorker, function: ComputeScore, arguments: dict[str, Any], timeout_s: float) -> Outcome:
    outcome: Outcome
    started = time.monotonic()
    try:
        worker.load(function)
        started = time.monotonic()  # neither the start of a process nor an import is part of the call
        outcome = check_score(worker.call(function, timeout_s, **arguments))
    except CallError as error:
        outcome = Failure(error.kind, str(error))
    return replace(outcome, seconds=time.monotonic() - started)


def _call_in_thread(function: ComputeScore, arguments: dict[str, Any], timeout_s: float) -> Outcome:
    """Return the outcome of a call in a thread of its own, which is left behind if it does not end in time."""
    outcomes: list[Outcome] = []

    def work() -> None:
        try:
            value = function(**arguments)
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
            outcomes.append(check_score(value))
        except BaseException as error:
            outcomes.append(raised(error))

    thread = threading.Thread(target=work, name="reward", daemon=True)
    started = time.monotonic()
    thread.start()
    thread.join(timeout_s)
    late = Failure("timeout", f"{function_name(function)} did not end within {timeout_s:g} s; its thread was left behind")
    outcome = outcomes[0] if outcomes else late
    return replace(outcome, seconds=time.monotonic() - started)


# -- async functions ---------------------------------------------------------------------------------------------------------


class _LoopLane:
    """The event loop of async reward functions. A loop that a call blocks is replaced. `close`, or the end of the last reference to this
    object, ends the loop as soon as its calls have ended."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None
        self._end: Any  # closes the loop, once

    def submit(self, function: ComputeScore, arguments: dict[str, Any]) -> Future[Outcome]:
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
        """End the loop when the calls that were started have ended; later calls get a new loop."""
        with self._lock:
            if self._loop is not None:
                self._end()
                self._loop = None


class EventLoop:
    """An event loop for async reward functions, with a thread that watches it: a call that blocks the loop past its deadline costs the
    calls beside it their answers, not the run.

    The loop ends only when every call has ended. A call that is left behind would be ended by the garbage collector, in whichever thread
    that runs; a call that catches this and tries again would hold that thread for ever.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._nap_s = min(0.5, timeout_s / 4)
        self._limit = asyncio.Semaphore(_MAX_OPEN_CALLS)
        self._open: set[Future[Outcome]] = set()
        self._lock = threading.Lock()  # of `_open`: the thread that takes a future out of it sets its result
        self._calls: set[asyncio.Task[Outcome]] = set()  # asyncio keeps only weak references to its tasks
        self._loop = LoopThread("reward-loop", self._nap_s)
        threading.Thread(target=self._watch, name="reward-loop-watch", daemon=True).start()

    def submit(self, function: ComputeScore, arguments: dict[str, Any]) -> Future[Outcome]:
        """Start a call. Not after `close`."""
        future: Future[Outcome] = Future()
        with self._lock:
            self._open.add(future)
        self._loop.submit(self._call(future, function, arguments))
        return future

    def is_blocked(self) -> bool:
        """Return whether a call keeps the loop from running the others."""
        return self._loop.silent_s > self._timeout_s + _LOOP_PATIENCE_S

    def close(self) -> None:
        """End the loop when the calls that were started have been answered and late calls have ended."""
        self._loop.submit(self._end())

    async def _end(self) -> None:
        while self._open:
            await asyncio.sleep(self._nap_s)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:  # late calls, and tasks that calls have started and left
            task.cancel()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()

    async def _call(self, future: Future[Outcome], function: ComputeScore, arguments: dict[str, Any]) -> None:
        async with self._limit:
            started = time.monotonic()
            task = asyncio.ensure_future(_awaited_outcome(function, arguments))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            # Not `wait_for`: it keeps waiting for a call that catches its cancellation, for example to try again after any exception.
            ended, _ = await asyncio.wait({task}, timeout=self._timeout_s)
            late = Failure("timeout", f"{function_name(function)} did not end within {self._timeout_s:g} s and was cancelled")
            outcome = task.result() if ended else late
            task.cancel()
        self._answer(future, replace(outcome, seconds=time.monotonic() - started))

    def _answer(self, future: Future[Outcome], outcome: Outcome) -> None:
        with self._lock:
            is_open = future in self._open
            self._open.discard(future)
        if is_open:
            future.set_result(outcome)

    def _watch(self) -> None:
        """While a call blocks the loop, fail all open calls. The loop may recover, and be blocked again."""
        text = f"an async reward function blocks its event loop for more than {self._timeout_s:g} s: it must await, not wait"
        while not self._loop.is_closed:
            if self.is_blocked():
                for future in list(self._open):
                    self._answer(future, Failure("timeout", text))
            time.sleep(self._nap_s)


async def _awaited_outcome(function: ComputeScore, arguments: dict[str, Any]) -> Outcome:
    try:
        return check_score(await function(**arguments))
    except BaseException as error:  # the function's own, or our cancellation, after which nothing reads this
        return raised(error)
