"""Call reward functions, each call under its own deadline. What comes back is a finite number or a failure, never an exception and never
a hang.

```text
process  a function that another process can find: killed at its deadline, whatever it does (see lockstep.rewards.killable)
thread   a function that lives only here (a lambda, a method, the running script) or holds the sandbox: left behind at its deadline
loop     an async function: many calls in one event loop, cancelled at their deadline
```

A call that is stuck delays nothing but itself.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lockstep.rewards.killable import CallError, KillableWorker, is_portable
from lockstep.rewards.outcome import Failure, Outcome, Score

ComputeScore = Callable[..., Any]
"""(data_source=, solution_str=, ground_truth=, extra_info=) -> a number, or a dict with "score"; sync or async."""

_MAX_OPEN_CALLS = 64
_LOOP_PATIENCE_S = 2.0
_SANDBOXED_S = 600.0
_MAX_FLOAT32 = float(torch.finfo(torch.float32).max)


class ScoringPool:
    """Scores rows in the background. Processes, threads and the event loop are started by the first call that needs them.

    Args:
        num_workers: Calls at once in processes, and in threads.
        timeout_s: Deadline of each call, from its own start.
    """

    def __init__(self, num_workers: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._processes = _Lane(num_workers, self._in_process)
        self._threads = _Lane(num_workers, functools.partial(_in_thread, timeout_s))
        self._sandboxed = _Lane(_MAX_OPEN_CALLS, functools.partial(_in_thread, max(timeout_s, _SANDBOXED_S)))
        self._loop: _LoopLane | None = None

    def submit(self, function: ComputeScore, arguments: dict[str, Any]) -> Future[Outcome]:
        """Start `function(**arguments)`. With an argument `sandbox` it waits for programs in one, which has its own deadlines and bounds
        how many run at once."""
        if _is_async(function):
            if self._loop is None or self._loop.is_blocked():
                self._loop = _LoopLane(self.timeout_s)
            return self._loop.submit(function, arguments)
        if "sandbox" in arguments:
            return self._sandboxed.submit(function, arguments)
        return (self._processes if is_portable(function) else self._threads).submit(function, arguments)

    def close(self) -> None:
        """End processes and threads; calls that have not started are failures."""
        self._processes.close()
        self._threads.close()
        self._sandboxed.close()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _in_process(self, worker: KillableWorker, function: ComputeScore, arguments: dict[str, Any]) -> Outcome:
        outcome: Outcome
        started = time.monotonic()
        try:
            worker.load(function)
            started = time.monotonic()
            outcome = check_score(worker.call(function, self.timeout_s, **arguments))
        except CallError as error:
            outcome = Failure(error.kind, str(error))
        return replace(outcome, seconds=time.monotonic() - started)


def _in_thread(timeout_s: float, worker: KillableWorker, function: ComputeScore, arguments: dict[str, Any]) -> Outcome:
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
    late = Failure("timeout", f"the call did not end within {timeout_s:g} s; its thread was left behind")
    return replace(outcome[0] if outcome else late, seconds=time.monotonic() - started)


class _Lane:
    """`width` threads that take jobs from one queue. A thread has a worker process of its own, started when it is used."""

    def __init__(self, width: int, run: Callable[..., Outcome]) -> None:
        self._width, self._run = width, run
        self._jobs: queue.SimpleQueue[tuple[Future[Outcome], ComputeScore, dict[str, Any]] | None] = queue.SimpleQueue()
        self._num_threads = self._open = 0
        self._lock = threading.Lock()

    def submit(self, function: ComputeScore, arguments: dict[str, Any]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        with self._lock:
            self._open += 1
            if self._num_threads < min(self._width, self._open):
                self._num_threads += 1
                threading.Thread(target=self._serve, name="scoring", daemon=True).start()
        self._jobs.put((future, function, arguments))
        return future

    def close(self) -> None:
        with self._lock:
            for _ in range(self._num_threads):
                self._jobs.put(None)
            self._num_threads = 0

    def _serve(self) -> None:
        worker = KillableWorker()
        while (job := self._jobs.get()) is not None:
            future, function, arguments = job
            try:
                future.set_result(self._run(worker, function, arguments))
            except BaseException as error:
                future.set_result(raised(error))
            with self._lock:
                self._open -= 1
        worker.close()


class _LoopLane:
    """An event loop on a thread of its own."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._loop = timeout_s, asyncio.new_event_loop()
        self._limit = asyncio.Semaphore(_MAX_OPEN_CALLS)
        self._open: set[Future[Outcome]] = set()
        self._seen = time.monotonic()
        self._closed = False
        threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True).start()
        threading.Thread(target=self._watch, name="reward-loop-watch", daemon=True).start()

    def submit(self, function: ComputeScore, arguments: dict[str, Any]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self._open.add(future)
        asyncio.run_coroutine_threadsafe(self._call(future, function, arguments), self._loop)
        return future

    def is_blocked(self) -> bool:
        """Whether a call keeps the loop from running the others."""
        return time.monotonic() - self._seen > self._timeout_s + _LOOP_PATIENCE_S

    def close(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _call(self, future: Future[Outcome], function: ComputeScore, arguments: dict[str, Any]) -> None:
        async with self._limit:
            started = time.monotonic()
            try:
                outcome = check_score(await asyncio.wait_for(function(**arguments), self._timeout_s))
            except TimeoutError:
                outcome = Failure("timeout", f"the call did not end within {self._timeout_s:g} s and was cancelled")
            except BaseException as error:
                outcome = raised(error)
        self._settle(future, replace(outcome, seconds=time.monotonic() - started))

    def _settle(self, future: Future[Outcome], outcome: Outcome) -> None:
        self._open.discard(future)
        if not future.done():
            future.set_result(outcome)

    def _watch(self) -> None:
        """See that the loop turns; when a call blocks it past its deadline, give up all that is open on it."""
        while not self.is_blocked():
            if self._closed:
                return
            self._loop.call_soon_threadsafe(self._tick)
            time.sleep(min(0.5, self._timeout_s / 4))
        text = f"an async reward function blocks its event loop for more than {self._timeout_s:g} s: it must await, not wait"
        for future in list(self._open):
            self._settle(future, Failure("timeout", text))

    def _tick(self) -> None:
        self._seen = time.monotonic()


def check_score(result: Any) -> Outcome:
    """What a reward function returned, as a Score; a Failure of kind "invalid" when it is not a finite number."""
    extra: dict[str, Any] = {}
    value = result
    if isinstance(result, dict):
        if "score" not in result:
            return Failure("invalid", f"the reward function returned a dict without 'score': {str(result)[:200]}")
        extra = {name: v for name, v in result.items() if name != "score"}
        value = result["score"]
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    # The reward tensor is float32, where a larger number would become infinite.
    if not (isinstance(value, int | float) and -_MAX_FLOAT32 <= value <= _MAX_FLOAT32):
        return Failure("invalid", f"the reward function returned {str(value)[:200]!r}, which is not a finite number")
    return Score(float(value), extra)


def raised(error: BaseException) -> Failure:
    """The failure of a call that raised, without the frames of this file."""
    tail = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return Failure("raised", "".join(traceback.format_exception(type(error), error, tail)))


def _is_async(function: ComputeScore) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
