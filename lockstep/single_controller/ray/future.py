"""Waiting for the answers of several Ray actors: the first failure ends the wait, and so does the deadline."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.errors import WorkerDied, WorkerError, WorkerTimeout
from lockstep.single_controller.base.dispatch import Collect
from lockstep.single_controller.base.worker_group import Future
from lockstep.single_controller.ray.cluster import import_ray

_ROOT_CAUSE_GRACE_S = 2.0
_ASK_S = 1.0


class RayFuture(Future):
    """The answers of ranks 0..n-1 to one call.

    `labels` names the ranks in errors and `task` the call. `fail` is told of the first failure and returns the error to
    raise, which is an earlier one if the group is broken already. While a wait lasts, `lost` is asked every second for the
    error of a rank that cannot answer any more, and a line on stderr every `heartbeat_s` says who is still out.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        labels: Sequence[str],
        task: str,
        timeout_s: float,
        heartbeat_s: float,
        collect: Collect,
        fail: Callable[[WorkerError], WorkerError],
        lost: Callable[[str], WorkerError | None] = lambda task: None,
    ) -> None:
        self._ray = import_ray()
        self._pending = {ref: rank for rank, ref in enumerate(refs)}
        self._answers: list[Any] = [None] * len(refs)
        self._labels = labels
        self._task = task
        self._collect = collect
        self._fail = fail
        self._lost = lost
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s
        self._heartbeat_s = heartbeat_s
        self._next_heartbeat = self._started + heartbeat_s
        self._error: WorkerError | None = None
        self._collected: list[Any] = []

    def get(self, timeout_s: float | None = None) -> Any:
        """See `Future.get`."""
        deadline = self._deadline if timeout_s is None else time.monotonic() + timeout_s
        while self._is_out():
            # What has been answered is taken however late it is: the driver may have been at something else, or stopped.
            if not self._take(min(deadline, self._next_heartbeat, time.monotonic() + _ASK_S)):
                if (lost := self._lost(self._task)) is not None:
                    self._error = self._fail(lost)
                elif time.monotonic() >= deadline:
                    self._error = self._fail(self._late())
            self._beat()
        if self._error is not None:
            raise self._error
        if not self._collected:
            self._collected = [self._collect(self._answers)]
            self._answers = []
        return self._collected[0]

    def done(self) -> bool:
        """See `Future.done`. True after the deadline too, because `get` raises then."""
        while self._is_out() and self._take(0.0):
            pass
        return not self._is_out() or time.monotonic() >= self._deadline

    def _is_out(self) -> bool:
        return self._error is None and bool(self._pending)

    def _take(self, until: float) -> bool:
        """Take the next answer, waiting for it; False if there was none."""
        try:
            return self._next_answer(until)
        except WorkerError as error:
            self._error = error  # an interrupt of what follows leaves no call without an answer
            self._error = self._fail(self._root_cause(error))
            return True

    def _next_answer(self, until: float) -> bool:
        """The same, but raises the WorkerError that the answer is."""
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=max(0.0, until - time.monotonic()))
        if ready:
            rank = self._pending[ready[0]]
            try:
                self._answers[rank] = self._answer(ready[0], rank)
            except WorkerError:
                del self._pending[ready[0]]
                raise
            del self._pending[ready[0]]  # not when it was interrupted: then the answer is still to be had
        return bool(ready)

    def _answer(self, ref: Any, rank: int) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, WorkerError) else WorkerError(self._labels[rank], str(error)) from None
        except exceptions.RayError as error:
            raise WorkerDied(self._labels[rank], f"during {self._task}: {error}") from None

    def _root_cause(self, error: WorkerError) -> WorkerError:
        """A death that surfaces right after `error`, else `error`.

        When a process dies in a collective, its peers often see the broken connection and raise before Ray reports the
        death.
        """
        until = time.monotonic() + _ROOT_CAUSE_GRACE_S
        while self._pending and not isinstance(error, WorkerDied):
            try:
                if not self._next_answer(until):
                    break
            except WorkerDied as death:
                return death
            except WorkerError:
                continue
        return error

    def _late(self) -> WorkerTimeout:
        ranks = sorted(self._pending.values())
        waited_s = time.monotonic() - self._started
        return WorkerTimeout(
            ", ".join(self._labels[rank] for rank in ranks),
            f"{self._task} was still out on rank(s) {ranks} after {waited_s:.1f} s. Where a worker is stuck is in the "
            "stacks on its stderr. If it was only slow, raise the group's timeout_s (start_timeout_s during start-up)",
        )

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat and self._is_out():
            self._next_heartbeat = now + self._heartbeat_s
            waited = now - self._started
            ranks = sorted(self._pending.values())
            print(f"lockstep: {self._task}: waited {waited:.0f} s, still out: rank(s) {ranks}", file=sys.stderr, flush=True)
