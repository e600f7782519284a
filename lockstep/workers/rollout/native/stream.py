"""NativeStream: jobs become samples of a scheduler, and what comes of their passes becomes answers. Between them is a Backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.base import Completion, not_finite
from lockstep.workers.rollout.counted import request_keys
from lockstep.workers.rollout.native.backend import Backend, Event
from lockstep.workers.rollout.native.scheduler import PENDING, Prompt, Sample, Scheduler
from lockstep.workers.rollout.native.scores import Scores, prompt_scores
from lockstep.workers.rollout.stream import Job, Stream, Tokens

if TYPE_CHECKING:
    from lockstep.workers.rollout.base import RolloutEngine


class NativeStream(Stream):
    """See Stream. The pages of `backend`, and what they hold, are this stream's until `close`, which calls `on_close`.

    When `engine.version` changes, what runs is computed again with the new weights and goes on; a completion has the version that drew its
    first token.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingParams,
        backend: Backend,
        scheduler: Scheduler,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(engine, sampling)
        self._backend, self._scheduler, self._on_close = backend, scheduler, on_close
        self._ready = ExitStack()
        self._passes: Iterator[list[Event]] | None = None
        self._to_abort: Set[int] = frozenset()
        self._to_release: list[int] = []
        self._version: int | None = None

    def release(self, index: int) -> None:
        super().release(index)
        with self._changed:
            self._to_release.append(index)

    def _shut(self) -> None:
        super()._shut()
        if self._passes is not None:
            self._passes.close()  # type: ignore[attr-defined]  # it is a generator
        self._ready.close()
        self._on_close()

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._scheduler.waiting)

    @property
    def num_pages(self) -> int:
        return self._scheduler.pool.capacity

    @property
    def num_free_pages(self) -> int:
        return self._scheduler.pool.num_free

    def _fault(self, job: Job) -> str | None:
        length, longest, pool = len(job.ids), job.limits.max_tokens, self._scheduler.pool
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
            while self._to_release:
                self._scheduler.release(self._to_release.pop())
            self._to_abort = aborted
            if self._passes is None:
                self._passes = iter(self._backend.run(self._scheduler, self._sampling, self._take_aborts))
            events += self._next_pass()
            return [answer for sample, reason in events for answer in self._answers_of(sample, reason)]

    def _next_pass(self) -> list[Event]:
        assert self._passes is not None
        events = next(self._passes, None)
        if events is None:
            self._passes = None
        return events or []

    def _renew(self) -> list[Event]:
        """The weights are new: take in what was computed with the old ones, and forget the rest."""
        events: list[Event] = []
        scheduler, jobs = self._scheduler, self._jobs
        if self._version is not None:
            scheduler.is_stale = True
            while self._passes is not None:
                events += self._next_pass()
            scheduler.forget()
            self._ready.close()
        self._ready.enter_context(self._backend.ready())
        self._version = self._engine.version
        for sample in scheduler.waiting:
            if not sample.tokens:
                jobs[sample.index].version = self._version
                if sample.scores is not None:
                    sample.scores.clear()
        return events

    def _take_aborts(self) -> Set[int]:
        aborts, self._to_abort = self._to_abort, frozenset()
        return aborts

    def _samples(self, jobs: Sequence[Job]) -> list[Sample]:
        """A sample for each job, those of one prompt together, in the order in which the prompts first appear."""
        groups: dict[object, tuple[Prompt, list[Sample]]] = {}
        for job, key in zip(jobs, _keys(jobs), strict=True):
            assert self._version is not None
            job.version, request = self._version, job.request
            # Who wants log-probs of the prompt, or has a part of it, computes it for itself.
            alone = request.prompt_log_probs or request.continues is not None
            own = job.index if alone else job.ids.numpy().tobytes()
            if own not in groups:
                groups[own] = Prompt(job.ids.tolist()), []
                if request.continues is not None:
                    self._scheduler.resume(groups[own][0], request.continues)
            prompt, samples = groups[own]
            sample = Sample(job.index, prompt, job.limits, key)
            sample.params, sample.position, sample.streams, sample.keep = (
                request.sampling,
                job.position,
                request.streams,
                request.keep,
            )
            if request.prompt_log_probs or request.top_log_probs:
                start = max(1, len(job.ids) - len(request.prompt_ids)) if request.prompt_log_probs else None
                sample.scores = Scores(request.top_log_probs, start)
            samples.append(sample)
        return [sample for _, samples in groups.values() for sample in samples]

    def _answers_of(self, sample: Sample, reason: str | None) -> Iterator[Completion | Tokens]:
        job, scores, tokens = self._jobs[sample.index], sample.scores, sample.tokens
        top = None if scores is None or not scores.top else scores.response
        if sample.streams:
            end = len(tokens) - (reason == "error")
            while end > job.num_sent and tokens[end - 1] == PENDING:
                end -= 1
            if end > job.num_sent:
                new = slice(job.num_sent, end)
                job.num_sent = end
                ids, log_probs = torch.tensor(tokens[new], dtype=torch.int64), torch.tensor(sample.log_probs[new])
                yield Tokens(job.index, ids, log_probs, None if top is None else top[new])
        if reason == "error":
            yield not_finite(job.index, job.request, len(tokens) - 1, job.version)
        elif reason is not None:
            ids, log_probs = torch.tensor(tokens, dtype=torch.int64), torch.tensor(sample.log_probs, dtype=torch.float32)
            extra = () if scores is None else prompt_scores(scores, len(job.ids), len(job.request.prompt_ids))
            tops = None if top is None else top[: len(tokens)]
            yield Completion(job.index, ids, log_probs, reason, job.version, None, tops, *extra)


def _keys(jobs: Sequence[Job]) -> list[int]:
    """`request_keys` of each job, under its own seed."""
    seeds = {job.params.seed for job in jobs}
    if len(seeds) == 1:
        return request_keys(seeds.pop(), [job.request.key for job in jobs]).tolist()
    return [int(request_keys(job.params.seed, [job.request.key])[0]) for job in jobs]
