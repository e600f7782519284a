"""NativeStream: jobs become samples of a scheduler, and what comes of their passes becomes answers. Between them is a Backend.

What a list of requests needs is here; open_stream.py adds what only a stream that stays open has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.generation.backend import Backend, Event
from lockstep.generation.scheduler import Prompt, Sample, Scheduler
from lockstep.workers.rollout.request import Completion, Job, Tokens, not_finite
from lockstep.workers.rollout.sampling import request_key
from lockstep.workers.rollout.stream import Stream

if TYPE_CHECKING:
    from lockstep.workers.rollout.base import RolloutEngine


class NativeStream(Stream):
    """See Stream. The pages of `backend`, and what they hold, are this stream's until `close`, which calls `on_close`."""

    poll_s = 0.0

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingParams,
        backend: Backend,
        scheduler: Scheduler,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(engine, sampling)
        self._backend = backend
        self._scheduler = scheduler
        self._on_close = on_close
        self._ready = ExitStack()
        self._passes: Iterator[list[Event]] | None = None
        self._to_abort: Set[int] = frozenset()
        self._version: int | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._scheduler.waiting)

    @property
    def num_pages(self) -> int:
        return self._scheduler.pool.capacity

    @property
    def num_free_pages(self) -> int:
        return self._scheduler.pool.num_free

    def _shut(self) -> None:
        super()._shut()
        if self._passes is not None:
            self._passes.close()  # type: ignore[attr-defined]  # it is a generator
        self._ready.close()
        self._on_close()

    def _fault(self, job: Job) -> str | None:
        length = len(job.ids)
        longest = job.limits.max_tokens
        pool = self._scheduler.pool
        if self._scheduler.can_hold(length, longest):
            return None
        return (
            f"prompt and response may have {length} + {longest} tokens, the key-value cache has room for {pool.capacity * pool.page_size}; "
            "free memory, raise actor_rollout_ref.rollout.gpu_memory_utilization, or lower the longest response"
        )

    def _work(self, arrived: Sequence[Job], aborted: set[int], left_s: float | None) -> list[Completion | Tokens]:
        with torch.no_grad():
            events = [] if self._version == self._engine.version else self._renew()
            self._scheduler.add(self._samples(arrived))
            self._to_abort = aborted
            if self._passes is None:
                self._passes = iter(self._backend.run(self._scheduler, self._sampling, self._take_aborts))
            events += self._next_pass()
            return [answer for sample, reason in events for answer in self._answers_of(self._jobs[sample.index], sample, reason)]

    def _next_pass(self) -> list[Event]:
        assert self._passes is not None
        events = next(self._passes, None)
        if events is None:
            self._passes = None
        return events or []

    def _renew(self) -> list[Event]:
        """The weights are others than before; what came of passes meanwhile."""
        self._ready.close()
        self._ready.enter_context(self._backend.ready())
        self._version = self._engine.version
        return []

    def _take_aborts(self) -> Set[int]:
        aborts = self._to_abort
        self._to_abort = frozenset()
        return aborts

    def _samples(self, jobs: Sequence[Job]) -> list[Sample]:
        """A sample for each job, those of one prompt together, in the order in which the prompts first appear."""
        groups: dict[object, tuple[Prompt, list[Sample]]] = {}
        for job in jobs:
            job.version = self._engine.version
            group = self._group_of(job)
            if group not in groups:
                groups[group] = self._prompt_of(job), []
            prompt, samples = groups[group]
            samples.append(self._sample_of(job, prompt, request_key(job.params.seed, job.request.key)))
        return [sample for _, samples in groups.values() for sample in samples]

    def _group_of(self, job: Job) -> object:
        """Jobs with the same are computed together as far as their prompts go."""
        return job.ids.numpy().tobytes()

    def _prompt_of(self, job: Job) -> Prompt:
        return Prompt(job.ids.tolist())

    def _sample_of(self, job: Job, prompt: Prompt, key: int) -> Sample:
        return Sample(job.index, prompt, job.limits, key, params=job.request.sampling)

    def _answers_of(self, job: Job, sample: Sample, reason: str | None) -> list[Completion | Tokens]:
        if reason is None:
            return []
        if reason == "error":
            return [not_finite(job.index, job.request, len(sample.tokens) - 1, job.version)]
        ids = torch.tensor(sample.tokens, dtype=torch.int64)
        log_probs = torch.tensor(sample.log_probs, dtype=torch.float32)
        return [Completion(job.index, ids, log_probs, reason, job.version)]
