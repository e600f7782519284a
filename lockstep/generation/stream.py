"""NativeStream: jobs become samples of a scheduler, and what comes of their passes becomes answers. Between them is a Backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.generation.backend import Backend, Event
from lockstep.generation.scheduler import PENDING, Prompt, Sample, Scheduler
from lockstep.generation.scores import Scores, prompt_scores
from lockstep.workers.rollout.request import Completion, Job, Tokens, TopLogProbs, not_finite
from lockstep.workers.rollout.sampling import request_key
from lockstep.workers.rollout.stream import Stream

if TYPE_CHECKING:
    from lockstep.workers.rollout.base import RolloutEngine


class NativeStream(Stream):
    """See Stream. The pages of `backend`, and what they hold, are this stream's until `close`, which calls `on_close`.

    When `engine.version` changes, what runs is computed again with the new weights and goes on; a completion has the version that drew its
    first token.
    """

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
        self._to_release: list[int] = []

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._scheduler.waiting)

    @property
    def num_pages(self) -> int:
        return self._scheduler.pool.capacity

    @property
    def num_free_pages(self) -> int:
        return self._scheduler.pool.num_free

    @property
    def num_kept_pages(self) -> int:
        return len(self._scheduler.cache or ())

    def release(self, index: int) -> None:
        super().release(index)
        with self._changed:
            self._to_release.append(index)
            if not self._is_working and not self._arrived:
                self._release_all()

    def _release_all(self) -> None:
        while self._to_release:
            self._scheduler.release(self._to_release.pop())

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
            answers = [answer for sample, reason in events for answer in self._answers_of(self._jobs[sample.index], sample, reason)]
        with self._changed:
            if not self._arrived:  # one of them may continue it
                self._release_all()
        return answers

    def _next_pass(self) -> list[Event]:
        assert self._passes is not None
        events = next(self._passes, None)
        if events is None:
            self._passes = None
        return events or []

    def _renew(self) -> list[Event]:
        """Lay the new weights out, and start what runs anew; return what came of passes meanwhile."""
        events: list[Event] = []
        scheduler = self._scheduler
        scheduler.is_stale = True
        while self._passes is not None:
            events += self._next_pass()
        scheduler.forget()
        for sample in scheduler.waiting:
            if not sample.tokens:
                self._jobs[sample.index].version = self._engine.version
                if sample.scores is not None:
                    sample.scores.clear()
        self._ready.close()
        self._ready.enter_context(self._backend.ready())
        self._version = self._engine.version
        return events

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
        """Jobs of the same group are computed together as far as their prompts go."""
        # Who wants log-probs of the prompt, or has a part of it, computes it for itself.
        alone = job.request.prompt_log_probs or job.request.continues is not None
        return job.index if alone else job.ids.numpy().tobytes()

    def _prompt_of(self, job: Job) -> Prompt:
        before = None
        if job.request.continues is not None:
            before = self._scheduler.ids_before(job.request.continues)
        # A long list that is there is joined far faster than the tensor is read.
        prompt = Prompt(job.ids.tolist() if before is None else before + job.request.prompt_ids.tolist())
        assert len(prompt.ids) == len(job.ids)
        if job.request.continues is not None:
            self._scheduler.resume(prompt, job.request.continues)
        return prompt

    def _sample_of(self, job: Job, prompt: Prompt, key: int) -> Sample:
        request = job.request
        sample = Sample(job.index, prompt, job.limits, key, params=request.sampling)
        sample.position = job.position
        sample.streams = request.streams
        sample.keep = request.keep
        if request.prompt_log_probs or request.top_log_probs:
            start = max(1, len(job.ids) - len(request.prompt_ids)) if request.prompt_log_probs else None
            sample.scores = Scores(request.top_log_probs, start)
        return sample

    def _answers_of(self, job: Job, sample: Sample, reason: str | None) -> list[Completion | Tokens]:
        """Its new tokens, if the request streams, and its completion, if it ended."""
        top = None
        if sample.scores is not None and sample.scores.top:
            top = sample.scores.response[: len(sample.tokens)]
        answers = self._tokens_of(job, sample, top) if sample.streams else []
        if reason is not None:
            answers.append(self._completion_of(job, sample, reason, top))
        return answers

    def _completion_of(self, job: Job, sample: Sample, reason: str, top: TopLogProbs | None) -> Completion:
        if reason == "error":
            return not_finite(job.index, job.request, len(sample.tokens) - 1, job.version)
        ids = torch.tensor(sample.tokens, dtype=torch.int64)
        log_probs = torch.tensor(sample.log_probs, dtype=torch.float32)
        completion = Completion(job.index, ids, log_probs, reason, job.version)
        if sample.experts is not None:
            completion = replace(completion, experts=sample.experts(len(sample)))
        if sample.scores is None:
            return completion
        own, own_top = prompt_scores(sample.scores, len(job.ids), len(job.request.prompt_ids))
        return replace(completion, top_log_probs=top, prompt_log_probs=own, prompt_top_log_probs=own_top)

    def _tokens_of(self, job: Job, sample: Sample, top: TopLogProbs | None) -> list[Completion | Tokens]:
        """The tokens of the sample that were not delivered yet, without the token of an error."""
        tokens = sample.tokens
        start = job.num_sent
        end = len(tokens)
        while end > start and (tokens[end - 1] == PENDING or not math.isfinite(sample.log_probs[end - 1])):
            end -= 1
        if end <= start:
            return []
        job.num_sent = end
        ids = torch.tensor(tokens[start:end], dtype=torch.int64)
        log_probs = torch.tensor(sample.log_probs[start:end])
        return [Tokens(job.index, ids, log_probs, None if top is None else top[start:end])]
