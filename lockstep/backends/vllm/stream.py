"""VLLMStream: the trainer's side of an exchange with vLLM's process (`child.VLLMChild.generate`)."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lockstep.backends.process import EngineProcess, Exchange
from lockstep.backends.vllm.child import Piece
from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.base import ProcessRollout
from lockstep.workers.rollout.request import Completion, Job, Tokens
from lockstep.workers.rollout.stream import Stream

COLDEST = 0.01
"""vLLM takes a lower temperature for this one, without an error."""


class VLLMStream(Stream):
    """See Stream. vLLM shares the pages of requests that start alike by itself, a continued one with what it continues among them."""

    poll_s = 0.005  # vLLM computes in another process

    def __init__(self, engine: ProcessRollout, sampling: SamplingParams, process: EngineProcess, watches: bool) -> None:
        super().__init__(engine, sampling)
        self._vllm = engine
        self._exchange = Exchange(process, "generate", watches)
        self._had: dict[int, Piece] = {}
        """What has come of the jobs in flight."""

    def _work(self, arrived: Sequence[Job], aborted: set[int], left_s: float | None) -> list[Completion | Tokens]:
        for job in arrived:
            self._had[job.index] = Piece(job.index)
            request = replace(job.request, prompt_ids=job.ids, sampling=None)
            self._exchange.send(("add", job.index, request, job.params, job.position))
        for index in aborted:
            self._exchange.send(("abort", index))
        pieces: list[Piece] | None = self._exchange.receive(left_s)
        return [answer for piece in pieces or () for answer in self._answers_of(piece)]

    def _shut(self) -> None:
        super()._shut()
        self._exchange.close()

    def _fault(self, job: Job) -> str | None:
        if 0 < job.params.temperature < COLDEST:
            return f"temperature={job.params.temperature} is below {COLDEST}, which vLLM would take instead; use 0 (greedy) or a higher one"
        return None

    def _answers_of(self, piece: Piece) -> list[Completion | Tokens]:
        job = self._jobs[piece.index]
        had = self._had[piece.index]
        answers: list[Completion | Tokens] = []
        had.ids += piece.ids
        had.log_probs += piece.log_probs
        had.tops += piece.tops
        had.prompt = piece.prompt or had.prompt
        had.prompt_tops = piece.prompt_tops or had.prompt_tops
        gives = self._vllm.gives_log_probs(job.params)
        wants_top = gives and job.request.top_log_probs > 0
        if job.request.streams and piece.ids:
            log_probs = torch.tensor(piece.log_probs) if gives else torch.full((len(piece.ids),), torch.nan)
            answers.append(Tokens(job.index, torch.tensor(piece.ids), log_probs, piece.tops if wants_top else None))
        if piece.reason is not None:
            del self._had[piece.index]
            tops = had.tops if job.request.top_log_probs else None
            completion = self._vllm.completed(job, had.ids, had.log_probs, piece.reason, tops)
            answers.append(self._with_prompt(job, had, completion))
        return answers

    def _with_prompt(self, job: Job, had: Piece, completion: Completion) -> Completion:
        """With the log-probs of the prompt, which vLLM gives at temperature 1 only: missing (NaN) at any other."""
        if not job.request.prompt_log_probs or completion.finish_reason == "error":
            return completion
        length = len(job.request.prompt_ids)
        missing = had.prompt is None or job.params.temperature not in (0.0, 1.0)
        values = torch.full((length,), torch.nan) if missing else torch.tensor(had.prompt)[-length:]
        tops = None if missing or not job.request.top_log_probs else had.prompt_tops[-length:]
        return replace(completion, prompt_log_probs=values, prompt_top_log_probs=tops)
