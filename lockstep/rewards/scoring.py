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
from typing import Any

from lockstep.config.reward import RewardConfig
from lockstep.processes import KillableWorker, is_portable
from lockstep.processes.errors import CallError
from lockstep.rewards.local_calls import MAX_OPEN_CALLS, EventLoops, call_in_thread
from lockstep.rewards.outcome import TRIED_AGAIN, Failure, Outcome, check_score, raised

ComputeScore = Callable[..., Any]
"""(data_source=, solution_str=, ground_truth=, extra_info=) -> a number, or a dict with "score"; sync or async."""

_SANDBOXED_S = 600.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
"""Between two calls for one reward: a service that is overloaded needs time."""


class ScoringPool:
    """Scores rows in the background. Processes, threads and the event loop are started by the first call that needs them; processes and
    threads end, when their calls have, with the pool: closed, or no longer referred to.

    Args:
        num_workers: Calls at once in processes, and in threads.
        timeout_s: Deadline of each call, from its own start.
        max_memory_mb: Memory of each process, and of each that it starts; None: no limit.
        retries: How often a call that raised, was late or lost its process is made again, after 1, 2, 4, ... s, at most 30. Each call has
            its own deadline; one that waits for its turn holds no process and no thread.
    """

    def __init__(
        self, num_workers: int, timeout_s: float, max_memory_mb: int | None = None, retries: int = RewardConfig.retries
    ) -> None:
        self.timeout_s = timeout_s
        self.retries = retries
        self._later = Later()
        self._processes = _Lane(num_workers, timeout_s, in_process=True, max_memory_mb=max_memory_mb)
        self._threads = _Lane(num_workers, timeout_s)
        self._sandboxed = _Lane(MAX_OPEN_CALLS, max(timeout_s, _SANDBOXED_S))
        self._loops = EventLoops(timeout_s)
        weakref.finalize(self, _close, [self._processes, self._threads, self._sandboxed]).atexit = False

    def submit(self, function: ComputeScore, arguments: dict[str, Any]) -> Future[Outcome]:
        """Start `function(**arguments)`. With an argument `sandbox` it waits for programs in one, which has its own deadlines and bounds
        how many run at once."""
        if not self.retries:
            return self._start(function, arguments)
        outcome: Future[Outcome] = Future()
        self._try(outcome, function, arguments, 0)
        return outcome

    def _try(self, outcome: Future[Outcome], function: ComputeScore, arguments: dict[str, Any], number: int) -> None:
        """Make a call for the `number`-th time again, and once more where it fails; `outcome` is that of the last one."""

        def ended(tried: Future[Outcome]) -> None:
            found = replace(tried.result(), num_retries=number)
            if isinstance(found, Failure) and found.kind in TRIED_AGAIN and number < self.retries:
                wait_s = min(_FIRST_WAIT_S * 2**number, _LONGEST_WAIT_S)
                self._later.run(wait_s, functools.partial(self._try, outcome, function, arguments, number + 1))
            else:
                outcome.set_result(found)

        try:
            started = self._start(function, arguments)
        except Exception as error:  # no thread could be started
            outcome.set_result(raised(error))
        else:
            started.add_done_callback(ended)

    def _start(self, function: ComputeScore, arguments: dict[str, Any]) -> Future[Outcome]:
        if _is_async(function):
            return self._loops.submit(function, arguments)
        if "sandbox" in arguments:
            return self._sandboxed.submit(function, arguments)
        return (self._processes if is_portable(function) else self._threads).submit(function, arguments)

    def close(self) -> None:
        """End processes, threads and the event loop when the calls that were started have ended."""
        _close([self._processes, self._threads, self._sandboxed])
        self._loops.close()


class Later:
    """Calls functions later, in a thread that ends when there is nothing to wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._is_served = False

    def run(self, after_s: float, function: Callable[[], None]) -> None:
        """Call `function`, which must return at once and raise nothing, in `after_s` seconds."""
        with self._changed:
            heapq.heappush(self._waiting, (time.monotonic() + after_s, next(self._numbers), function))
            self._changed.notify()
            if not self._is_served:
                self._is_served = True
                threading.Thread(target=self._serve, name="scoring-later", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while self._waiting and (left := self._waiting[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left)
                if not self._waiting:
                    self._is_served = False
                    return
                _, _, function = heapq.heappop(self._waiting)
            function()
            del function  # it may hold the last reference to the pool


class _Lane:
    """`width` threads that take calls from one queue; each makes them in a worker process of its own, or here."""

    def __init__(self, width: int, timeout_s: float, in_process: bool = False, max_memory_mb: int | None = None) -> None:
        self._width = width
        self._timeout_s = timeout_s
        self._in_process = in_process
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
