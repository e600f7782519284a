"""Call reward functions, each call under its own deadline. What comes back is a finite number or a failure, never an exception and never
a hang.

```text
process  a function that another process can find: killed at its deadline, whatever it does (see lockstep.processes)
thread   a function that lives only here (a lambda, a method, the running script) or holds the sandbox: left behind at its deadline
loop     an async function: many calls in one event loop, cancelled at their deadline
```

A call that is stuck delays nothing but itself.
"""

import functools
import inspect
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from lockstep.processes import KillableWorker, is_portable
from lockstep.processes.errors import CallError
from lockstep.rewards.local_calls import MAX_OPEN_CALLS, EventLoops, call_in_thread
from lockstep.rewards.outcome import Failure, Outcome, check_score, raised

ComputeScore = Callable[..., Any]
"""(data_source=, solution_str=, ground_truth=, extra_info=) -> a number, or a dict with "score"; sync or async."""

_SANDBOXED_S = 600.0


class ScoringPool:
    """Scores rows in the background. Processes, threads and the event loop are started by the first call that needs them; processes and
    threads end, when their calls have, with the pool: closed, or no longer referred to.

    Args:
        num_workers: Calls at once in processes, and in threads.
        timeout_s: Deadline of each call, from its own start.
        max_memory_mb: Memory of each process, and of each that it starts; None: no limit.
    """

    def __init__(self, num_workers: int, timeout_s: float, max_memory_mb: int | None = None) -> None:
        self.timeout_s = timeout_s
        self._processes = _Lane(num_workers, timeout_s, in_process=True, max_memory_mb=max_memory_mb)
        self._threads = _Lane(num_workers, timeout_s)
        self._sandboxed = _Lane(MAX_OPEN_CALLS, max(timeout_s, _SANDBOXED_S))
        self._loops = EventLoops(timeout_s)
        weakref.finalize(self, _close, [self._processes, self._threads, self._sandboxed]).atexit = False

    def submit(self, function: ComputeScore, arguments: dict[str, Any]) -> Future[Outcome]:
        """Start `function(**arguments)`. With an argument `sandbox` it waits for programs in one, which has its own deadlines and bounds
        how many run at once."""
        if _is_async(function):
            return self._loops.submit(function, arguments)
        if "sandbox" in arguments:
            return self._sandboxed.submit(function, arguments)
        return (self._processes if is_portable(function) else self._threads).submit(function, arguments)

    def close(self) -> None:
        """End processes, threads and the event loop when the calls that were started have ended."""
        _close([self._processes, self._threads, self._sandboxed])
        self._loops.close()


class _Lane:
    """`width` threads that take calls from one queue; each makes them in a worker process of its own, or here."""

    def __init__(self, width: int, timeout_s: float, in_process: bool = False, max_memory_mb: int | None = None) -> None:
        self._width, self._timeout_s, self._in_process = width, timeout_s, in_process
        self._max_memory_mb = max_memory_mb
        self._jobs: queue.SimpleQueue[tuple[Future[Outcome], ComputeScore, dict[str, Any]] | None] = queue.SimpleQueue()
        self._num_threads = self._open = 0
        self._lock = threading.RLock()  # taken again where the pool is collected by a thread that has it

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
        worker = KillableWorker(self._max_memory_mb)
        while (job := self._jobs.get()) is not None:
            future, function, arguments = job
            try:
                call = functools.partial(_call_in, worker) if self._in_process else call_in_thread
                future.set_result(call(self._timeout_s, function, arguments))
            except BaseException as error:
                future.set_result(raised(error))
            with self._lock:
                self._open -= 1
        worker.close()


def _close(lanes: list[_Lane]) -> None:
    for lane in lanes:
        lane.close()


def _call_in(worker: KillableWorker, timeout_s: float, function: ComputeScore, arguments: dict[str, Any]) -> Outcome:
    outcome: Outcome
    started = time.monotonic()
    try:
        worker.load(function)
        started = time.monotonic()
        outcome = check_score(worker.call(function, timeout_s, **arguments))
    except CallError as error:
        outcome = Failure(error.kind, str(error))
    return replace(outcome, seconds=time.monotonic() - started)


def _is_async(function: ComputeScore) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
