"""OpenStream: a NativeStream whose requests may be continued, are told of their tokens, or want more log-probs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lockstep.generation.backend import Event
from lockstep.generation.open_scheduler import OpenScheduler
from lockstep.generation.scheduler import PENDING, Prompt, Sample
from lockstep.generation.scores import Scores, prompt_scores
from lockstep.generation.stream import NativeStream
from lockstep.workers.rollout.request import Completion, Job, Tokens, TopLogProbs


class OpenStream(NativeStream):
    """See NativeStream. When `engine.version` changes, what runs is computed again with the new weights and goes on; a completion has the
    version that drew its first token."""

    _scheduler: OpenScheduler

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._to_release: list[int] = []

    @property
    def num_kept_pages(self) -> int:
        return len(self._scheduler.cache or ())

    def release(self, index: int) -> None:
        super().release(index)
        with self._changed:
            self._to_release.append(index)
            if not self._is_working and not self._arrived:
                self._release_all()

    def _work(self, arrived: Sequence[Job], aborted: set[int], left_s: float | None) -> list[Completion | Tokens]:
        answers = super()._work(arrived, aborted, left_s)
        with self._changed:
            if not self._arrived:  # one of them may continue it
                self._release_all()
        return answers

    def _release_all(self) -> None:
        while self._to_release:
            self._scheduler.release(self._to_release.pop())

    def _renew(self) -> list[Event]:
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
        return events + super()._renew()

    def _group_of(self, job: Job) -> object:
        # Who wants log-probs of the prompt, or has a part of it, computes it for itself.
        alone = job.request.prompt_log_probs or job.request.continues is not None
        return job.index if alone else super()._group_of(job)

    def _prompt_of(self, job: Job) -> Prompt:
        if job.request.continues is None:
            return super()._prompt_of(job)
        before = self._scheduler.ids_before(job.request.continues)
        # A long list that is there is joined far faster than the tensor is read.
        prompt = super()._prompt_of(job) if before is None else Prompt(before + job.request.prompt_ids.tolist())
        assert len(prompt.ids) == len(job.ids)
        self._scheduler.resume(prompt, job.request.continues)
        return prompt

    def _sample_of(self, job: Job, prompt: Prompt, key: int) -> Sample:
        sample = super()._sample_of(job, prompt, key)
        request = job.request
        sample.position = job.position
        sample.streams = request.streams
        sample.keep = request.keep
        if request.prompt_log_probs or request.top_log_probs:
            start = max(1, len(job.ids) - len(request.prompt_ids)) if request.prompt_log_probs else None
            sample.scores = Scores(request.top_log_probs, start)
        return sample

    def _answers_of(self, job: Job, sample: Sample, reason: str | None) -> list[Completion | Tokens]:
        scores = sample.scores
        top = None if scores is None or not scores.top else scores.response[: len(sample.tokens)]
        answers = self._tokens_of(job, sample, top) if sample.streams else []
        for completion in super()._answers_of(job, sample, reason):
            if scores is not None and isinstance(completion, Completion) and completion.error is None:
                own, own_top = prompt_scores(scores, len(job.ids), len(job.request.prompt_ids))
                completion = replace(completion, top_log_probs=top, prompt_log_probs=own, prompt_top_log_probs=own_top)
            answers.append(completion)
        return answers

    def _tokens_of(self, job: Job, sample: Sample, top: TopLogProbs | None) -> list[Completion | Tokens]:
        """What the sample has that was not delivered yet; not the token of an error."""
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
