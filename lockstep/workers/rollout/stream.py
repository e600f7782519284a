"""Stream: an engine that stays open. Requests join, go on, stop and leave while others run (docs/generation_streams.md).

`add`, `abort` and `release` may be called from any thread. `next` is called by one: nothing is computed but inside it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.request import Completion, Job, KeptRequest, Request, Stopping, Tokens, failed, fault_of

if TYPE_CHECKING:
    from lockstep.workers.rollout.base import RolloutEngine


class Stream(ABC):
    """Requests to one engine, from `RolloutEngine.open` until `close`. A context manager.

    A request that can never be served gets a Completion with finish_reason "error", at once; so does one whose logits are not finite.
    Every other gets exactly one Completion, in whatever order they finish.
    """

    poll_s: float
    """A timeout with which `next`, called again and again, keeps the engine busy and the caller from spinning."""

    def __init__(self, engine: RolloutEngine, sampling: SamplingParams) -> None:
        self._engine = engine
        self._sampling = sampling
        self._changed = threading.Condition()
        """Guards what `add`, `abort`, `release` and `close` change."""
        self._count = 0
        self._arrived: deque[Job] = deque()
        self._aborts: set[int] = set()
        self._jobs: dict[int, Job] = {}
        self._turns: dict[int, KeptRequest] = {}
        self._answers: deque[Completion | Tokens] = deque()
        self._closed = self._is_working = False

    def add(self, request: Request) -> int:
        """Queue a request; returns its index in this stream. Never blocks. From any thread. Raises RuntimeError when closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the stream is closed: open another one")
            index = self._count
            self._count = self._count + 1
            job = self._job(index, request)
            if isinstance(job, Job):
                self._jobs[index] = job
                self._arrived.append(job)
            else:
                self._answers.append(failed(index, request, job, self._engine.version))
            self._changed.notify_all()
        return index

    def next(self, timeout_s: float | None = None) -> Completion | Tokens | None:
        """What came next. None after `timeout_s` (0: at once when nothing is in flight, otherwise after one pass), and when the stream is
        closed. Without a timeout and with nothing in flight it waits for an `add` from another thread.

        One thread only: it runs the passes. Raises what the engine raises when it breaks down, WeightSyncError for weights that are not
        whole.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._answers or self._closed:
                    return self._answers.popleft() if self._answers else None
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._jobs:
                    if left == 0.0:
                        return None
                    self._changed.wait(left)
                    continue
                arrived = list(self._arrived)
                aborts = self._aborts & self._jobs.keys()
                self._arrived.clear()
                self._aborts = set()
                self._is_working = True
            answers = self._worked(arrived, aborts, left)
            if not answers and left == 0.0:
                return None

    def _worked(self, arrived: list[Job], aborts: set[int], left_s: float | None) -> list[Completion | Tokens]:
        """`_work`, and what it means for the jobs. When it raises, the stream is closed."""
        answers: list[Completion | Tokens] | None = None
        try:
            self._engine.check_weights()
            answers = self._work(arrived, aborts, left_s)
        finally:
            with self._changed:
                self._is_working = False
                if answers is None:
                    self._closed = True
                if self._closed:
                    self._shut()
        with self._changed:
            for answer in answers:
                if isinstance(answer, Completion):
                    self._end(answer)
            self._answers.extend(answers)
        return answers

    def __iter__(self) -> Iterator[Completion | Tokens]:
        """What comes until nothing is in flight."""
        while (self._jobs or self._answers) and (answer := self.next()) is not None:
            yield answer

    def abort(self, index: int) -> None:
        """End a request before the next pass: its completion has what it had by then ("abort"). Nothing for one that has finished. From any
        thread."""
        with self._changed:
            self._aborts.add(index)

    def release(self, index: int) -> None:
        """Forget a finished request that was added with `keep`; nothing for any other. From any thread."""
        with self._changed:
            self._turns.pop(index, None)

    def close(self) -> None:
        """End the stream: what is in flight gets no completion, and `next` gives None. May be called again, and from any thread: a pass
        that is being computed is the last."""
        with self._changed:
            if not self._closed:
                self._closed = True
                if not self._is_working:
                    self._shut()
                self._changed.notify_all()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def has_answers(self) -> bool:
        """Whether `next` returns at once, without computing anything."""
        return bool(self._answers)

    @property
    def num_running(self) -> int:
        """Requests that are being computed."""
        return len(self._jobs) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._arrived)

    @property
    def num_pages(self) -> int:
        """Pages of the key-value cache; 0 where the engine does not say."""
        return 0

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing: neither of a request in flight nor of one that others may share or continue."""
        return 0

    @property
    def num_kept_pages(self) -> int:
        """Pages that hold tokens for requests that may come, whether or not one in flight shares them."""
        return 0

    @abstractmethod
    def _work(self, arrived: Sequence[Job], aborted: set[int], left_s: float | None) -> list[Completion | Tokens]:
        """Take these in, end those, and compute for a while: one pass, or about `left_s`. Called while something is in flight."""

    def _shut(self) -> None:
        """Give back what the stream has. Called once, when nothing is being computed."""
        self._jobs.clear()
        self._arrived.clear()
        self._turns.clear()

    def _fault(self, job: Job) -> str | None:
        """Why this engine can never serve the job; None if it can."""
        return None

    def _job(self, index: int, request: Request) -> Job | str:
        """The job, or why it cannot be served."""
        engine = self._engine
        ids = request.prompt_ids
        position = 0
        if request.continues is not None:
            turn = self._turns.get(request.continues)
            if turn is None:
                return f"it continues request {request.continues}, which was not kept, has not finished, or was released"
            ids = torch.cat([turn.ids, ids])
            position = turn.position + len(request.prompt_ids)
        params = request.sampling or self._sampling
        fault = fault_of(request, params, len(ids), engine.vocabulary, engine.context, engine.decode_text is not None)
        if fault is not None:
            return fault
        limits = Stopping.of(request, params, engine.context, engine.decode_text, len(ids))
        job = Job(index, request, params, ids, limits, position)
        return self._fault(job) or job

    def _end(self, completion: Completion) -> None:
        """The job has its completion."""
        job = self._jobs.pop(completion.index, None)
        if job is not None and job.request.keep and completion.finish_reason != "error":
            ids = torch.cat([job.ids, completion.ids])
            self._turns[completion.index] = KeptRequest(ids, job.position + len(completion.ids))
