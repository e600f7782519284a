"""HFRollout: transformers' own generate. Slow, and the standard that the native engine is compared with."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from lockstep.config.sampling import SamplingParams
from lockstep.protocol import Ragged
from lockstep.workers.rollout.base import ModuleRollout
from lockstep.workers.rollout.request import Completion, Job, Stopping, Tokens, TopLogProbs, not_finite
from lockstep.workers.rollout.sampling import lower, request_key
from lockstep.workers.rollout.stream import Stream


class HFRollout(ModuleRollout):
    """See RolloutEngine. Randomness is seeded for each padded batch by its first request, so it depends on how requests are batched.

    Completions come a batch at a time. Every row of a batch runs as long as its longest, and is cut to its own limits afterwards.
    """

    attention = "sdpa"

    def open(self, sampling: SamplingParams, *, num_tokens: int | None = None) -> Stream:
        """See RolloutEngine. A continued request is computed from its first token, and a response comes in one piece."""
        self.check_weights()
        return HFStream(self, sampling)

    @torch.no_grad()
    def generate_batch(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        """The completions of jobs that are drawn alike, by the parameters of the first."""
        # A folder's own settings (a repetition penalty, say) would change what is sampled behind the run's back.
        self.module.generation_config = GenerationConfig()
        device = self.module.device
        params = jobs[0].params
        prompts = Ragged.from_rows([job.ids for job in jobs])
        mask = prompts.like(torch.ones_like(prompts.values)).pad(0, side="left").to(device)
        finite = _CheckFinite(len(jobs))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(request_key(params.seed, jobs[0].request.key) + jobs[0].position)
            out = self.module.generate(  # type: ignore[operator]  # a causal language model has it
                input_ids=prompts.pad(self.pad_token_id, side="left").to(device),
                attention_mask=mask,
                max_new_tokens=max(job.limits.max_tokens for job in jobs),
                eos_token_id=_ends_all([job.limits for job in jobs]),
                pad_token_id=self.pad_token_id,
                return_dict_in_generate=True,
                output_logits=True,
                logits_processor=LogitsProcessorList([finite, _Lower(params, mask.shape[1])]),
                **_options(params),
            )
        tokens = out.sequences[:, mask.shape[1] :]
        logits = torch.stack(out.logits, dim=1).float() / (params.temperature or 1.0)
        log_probs = logits.log_softmax(-1)
        drawn = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
        for row, job in enumerate(jobs):
            end = job.limits.end(tokens[row].tolist())
            assert end is not None, "transformers generated less than it was asked for"
            length, reason = end
            bad = finite.first_bad[row]
            if bad is not None and bad < length:
                yield not_finite(job.index, job.request, bad, self.version)
            else:
                top = _top(log_probs[row, :length], job.request.top_log_probs)
                ids = tokens[row, :length].cpu()
                own = drawn[row, :length].cpu()
                yield Completion(job.index, ids, own, reason, self.version, None, top, *self._prompt_log_probs(job))

    def _prompt_log_probs(self, job: Job) -> tuple[Tensor | None, TopLogProbs | None]:
        if not job.request.prompt_log_probs:
            return None, None
        logits = self.module(input_ids=job.ids[None].to(self.module.device)).logits[0].float() / (job.params.temperature or 1.0)
        log_probs = logits.log_softmax(-1).cpu()
        length = len(job.request.prompt_ids)
        own = torch.cat([torch.tensor([torch.nan]), log_probs[:-1].gather(-1, job.ids[1:, None]).squeeze(-1)])
        top = _top(log_probs[:-1], job.request.top_log_probs)
        return own[-length:], None if top is None else ([[], *top])[-length:]


class HFStream(Stream):
    """See Stream. One padded batch after the other: the oldest request, and those behind it that are drawn alike."""

    poll_s = 0.0
    _queue: list[Job]

    def __init__(self, engine: HFRollout, sampling: SamplingParams) -> None:
        super().__init__(engine, sampling)
        self._hf = engine
        self._queue = []

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._queue)

    def _work(self, arrived: Sequence[Job], aborted: set[int], left_s: float | None) -> list[Completion | Tokens]:
        version = self._hf.version
        queue = [*self._queue, *arrived]
        none = torch.empty(0, dtype=torch.int64)
        answers: list[Completion | Tokens] = [Completion(i, none, none.float(), "abort", version) for i in sorted(aborted)]
        queue = [job for job in queue if job.index not in aborted]
        batch = [job for job in queue if job.params == queue[0].params][: self._hf.seats]
        self._queue = [job for job in queue if job not in batch]
        for completion in self._hf.generate_batch(batch) if batch else ():
            if self._jobs[completion.index].request.streams and len(completion.ids):
                answers.append(Tokens(completion.index, completion.ids, completion.log_probs, completion.top_log_probs))
            answers.append(completion)
        return answers


def _top(log_probs: Tensor, top: int) -> TopLogProbs | None:
    """The `top` most likely tokens of each row of `log_probs` [rows, vocabulary]; None for 0 of them."""
    if not top:
        return None
    values, ids = log_probs.topk(min(top, log_probs.shape[-1]), -1)
    return [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]


def _options(sampling: SamplingParams) -> dict[str, float | bool | int]:
    if not sampling.temperature:
        return {"repetition_penalty": sampling.repetition_penalty, "do_sample": False}
    names = ("repetition_penalty", "temperature", "top_p", "min_p")
    return {"do_sample": True, "top_k": max(sampling.top_k, 0)} | {name: getattr(sampling, name) for name in names}


def _ends_all(limits: Sequence[Stopping]) -> list[int] | None:
    """The stop tokens that every row has: transformers ends a row at them itself; the others are looked for afterwards."""
    return sorted(frozenset.intersection(*(limit.token_ids for limit in limits))) or None


class _CheckFinite(LogitsProcessor):
    """Notes the first token of each row whose logits are not finite, and lets generate go on: it would fail without saying where."""

    def __init__(self, rows: int) -> None:
        self.first_bad: list[int | None] = [None] * rows
        self._steps = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bad = ~torch.isfinite(scores.float().logsumexp(-1))
        for row in bad.nonzero().flatten().tolist():
            self.first_bad[row] = self._steps if self.first_bad[row] is None else self.first_bad[row]
        self._steps += 1
        return scores.masked_fill(bad[:, None], 0.0)


class _Lower(LogitsProcessor):
    """Presence and frequency penalties on what comes after the `start` first tokens."""

    def __init__(self, params: SamplingParams, start: int) -> None:
        self._penalties = (params.presence_penalty, params.frequency_penalty)
        self._start = start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return lower(scores, list(input_ids[:, self._start :]), *self._penalties) if any(self._penalties) else scores
