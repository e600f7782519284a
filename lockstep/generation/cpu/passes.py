"""PassBackend: compute a pass, wait for it, look, and plan the next. torch_backend.py and fused_backend.py say how a pass is computed."""

from __future__ import annotations

import math
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.generation.backend import Backend, Event, TakeAborts
from lockstep.generation.cpu.paged_attention import StepBatch
from lockstep.generation.pages import CacheShape, KVCache
from lockstep.generation.scheduler import Pass, Sample, Scheduler
from lockstep.generation.scores import places_of, scored_rows, take_scores, top_of, with_drawn
from lockstep.observability.spans import running
from lockstep.utils.device import available_ram
from lockstep.workers.rollout.sampling import sample, uniforms

if TYPE_CHECKING:
    from lockstep.generation.scheduler import Sample


PAGE_SIZE = 16
"""Tokens per page on the CPU: little is lost in a last page that is not full, and a page is still copied in one stretch."""
_RAM_SHARE = 0.5
"""Of the free memory of a CPU machine, how much the pages may take."""
_MOST_TOKENS = 480
"""Tokens of a pass on the CPU: with more, activations leave the cache between one operation and the next. Five times the 96 rows that
linear.c multiplies together: 512, in tiles that are not full, take 2 % longer each."""
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""The sampling parameters that decide how a row is drawn."""


def batch_of(planned: Pass, page_size: int) -> StepBatch:
    """The tensors of a pass. Between two passes nothing is computed with, so this is written to be quick: lists of numbers in Python, and
    few calls of PyTorch, each of which costs as much as a hundred of them."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sample_from: list[int] = []
    drawn: list[Sample] = []
    table = array("i")
    most = max(len(row.sample.pages) for row in planned.rows)
    for row in planned.rows:
        pages = row.sample.pages
        start = row.sample.num_cached
        places = range(start, start + row.count)
        draws = row.draws
        input_ids += row.sample.slice(start, start + row.count)
        positions += places
        slots += [pages[place // page_size] * page_size + place % page_size for place in places]
        sample_from += [len(input_ids) - 1] * len(draws)
        drawn += draws
        table.extend(pages)
        table.extend([0] * (most - len(pages)))
    return StepBatch(
        input_ids=torch.tensor(input_ids),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        query_lens=[row.count for row in planned.rows],
        context_lens=torch.tensor([row.sample.num_cached for row in planned.rows], dtype=torch.int32),
        page_table=torch.frombuffer(table, dtype=torch.int32).view(-1, most),
        sample_from=torch.tensor(sample_from, dtype=torch.int64),
        draws=drawn,
        scored=scored_rows(planned.rows) if any(row.sample.scores for row in planned.rows) else [],
    )


class PassBackend(Backend):
    """See Backend. Each pass draws one token for a row that is complete. With `invariant` tokens are drawn a row at a time."""

    def __init__(self, module: PreTrainedModel, shape: CacheShape, gpu_memory_utilization: float, invariant: bool = False) -> None:
        self.module = module
        self.shape = shape
        self.page_size = shape.page_size
        self.most_tokens = _MOST_TOKENS if module.device.type == "cpu" else None
        self._gpu_memory_utilization = gpu_memory_utilization
        self._invariant = invariant
        self._cache: KVCache | None = None

    @abstractmethod
    def forward(self, batch: StepBatch, logits_at: Tensor) -> Tensor:
        """Compute a pass; the logits [S, vocabulary] of its tokens `logits_at` [S], ascending. They are there until the next pass."""

    def run(self, scheduler: Scheduler, sampling: SamplingParams, take_aborts: TakeAborts = set) -> Iterator[list[Event]]:
        while not scheduler.is_idle and not scheduler.is_stale:
            events: list[Event] = [(ended, "abort") for ended in scheduler.abort(take_aborts())]
            planned = scheduler.plan()
            if planned.rows:
                self.copy_pages(planned.copies)
                events += _take_in(scheduler, planned, *self.step(batch_of(planned, self.page_size), sampling))
            for ended, reason in events:
                if reason is not None:
                    scheduler.settle(ended, reason)
            yield events

    def most_pages(self) -> int:
        device = self.module.device
        if device.type == "cuda":
            free = int(torch.cuda.mem_get_info(device)[0] * self._gpu_memory_utilization)
        else:
            free = int(available_ram() * _RAM_SHARE)
        return free // self.shape.page_bytes

    def open(self, num_pages: int) -> None:
        self.close()
        self._cache = KVCache(self.shape, num_pages, self.module.device)
        self.num_pages = num_pages

    def close(self) -> None:
        self._cache = None
        self.num_pages = 0

    def copy_pages(self, copies: dict[int, int]) -> None:
        """Copy pages, all at once: target -> source."""
        assert self._cache is not None, "the backend is closed"
        self._cache.copy_pages(copies)

    def step(self, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        """Compute a pass and draw: tokens [S] int64 and log-probs [S] float32, not finite where the logits are not."""
        if any(drawn.scores is not None for drawn in batch.draws) or batch.scored:
            return self._scored_step(batch, sampling)
        if not len(batch.sample_from):
            self.forward(batch, batch.sample_from)
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        return self.draw(self.logits_of(batch, batch.sample_from), batch.draws, sampling)

    def logits_of(self, batch: StepBatch, wanted: Tensor) -> Tensor:
        """Compute a pass; the logits [W, vocabulary] after its tokens `wanted` [W], of which samples of one prompt name the same."""
        if all(one < other for one, other in pairwise(wanted.tolist())):
            return self.forward(batch, wanted)
        distinct, inverse = wanted.unique(return_inverse=True)
        logits = self.forward(batch, distinct)
        return logits[inverse.to(logits.device)]

    def draw(self, logits: Tensor, draws: Sequence[Sample], sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs [S] of these samples, from their logits [S, vocabulary]."""
        if any(drawn.params is not None for drawn in draws):
            return self._draw_each(logits, draws, sampling)
        tokens, log_probs = self.draw_alike(logits, draws, sampling)
        return tokens.cpu(), log_probs.cpu()

    def draw_alike(self, logits: Tensor, draws: Sequence[Sample], params: SamplingParams) -> tuple[Tensor, Tensor]:
        """`draw` with the same parameters for all."""
        uniform = uniforms(*numbers_of(draws)).to(logits.device)
        size = 1 if self._invariant else len(logits)
        parts = [_sample(logits, uniform, draws, params, slice(row, row + size)) for row in range(0, len(logits), size)]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_probs for _, log_probs in parts])

    def _scored_step(self, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        """`step` of a pass with samples that want more log-probs: they get them."""
        wanted = torch.cat([batch.sample_from, torch.tensor(places_of(batch.scored), dtype=torch.int64)])
        logits = self.logits_of(batch, wanted)
        own = logits[: len(batch.draws)]
        prompts = logits[len(batch.draws) :]
        if batch.scored:
            take_scores(batch.scored, prompts, [(row.sample.params or sampling).temperature for row in batch.scored])
        if not batch.draws:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        tokens, log_probs = self.draw(own, batch.draws, sampling)
        for row, drawn in enumerate(batch.draws):
            if drawn.scores is not None and drawn.scores.top:
                top = top_of(own[row], drawn.scores.top, (drawn.params or sampling).temperature)
                drawn.scores.response.append(with_drawn(top, int(tokens[row]), float(log_probs[row])))
        return tokens, log_probs

    def _draw_each(self, logits: Tensor, draws: Sequence[Sample], sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        """`draw` of samples with parameters of their own: those that have the same are drawn together."""
        groups: dict[tuple[object, ...], list[int]] = {}
        params = [drawn.params or sampling for drawn in draws]
        for row, own in enumerate(params):
            groups.setdefault(tuple(getattr(own, name) for name in OPTIONS), []).append(row)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        log_probs = torch.empty(len(logits))
        for rows in groups.values():
            drawn = self.draw_alike(logits[rows], [draws[row] for row in rows], params[rows[0]])
            tokens[rows], log_probs[rows] = (x.cpu() for x in drawn)
        return tokens, log_probs


def numbers_of(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """[S] int64 each: what the random number of the next token of each sample is made of, its key and its position."""
    keys = torch.tensor([sample.key for sample in samples], dtype=torch.int64)
    return keys, torch.tensor([sample.position + len(sample.tokens) for sample in samples], dtype=torch.int64)


def _sample(
    logits: Tensor, uniform: Tensor, samples: Sequence[Sample], params: SamplingParams, rows: slice
) -> tuple[Tensor, Tensor]:
    penalised = samples[rows] if params.penalises else ()
    return sample(
        logits[rows],
        uniform[rows],
        history=[torch.tensor(sample.slice(0, len(sample))) for sample in penalised],
        responses=[torch.tensor(sample.tokens, dtype=torch.int64) for sample in penalised],
        **{name: getattr(params, name) for name in OPTIONS},
    )


def _take_in(scheduler: Scheduler, planned: Pass, tokens: Tensor, log_probs: Tensor) -> list[Event]:
    """The scheduler learns what a pass has drawn; what came of it."""
    for one in running[-1:]:
        one.written += len(tokens)
    events: list[Event] = []
    drawn = zip(tokens.tolist(), log_probs.tolist(), strict=True)
    for row, draws in [(row, row.draws) for row in planned.rows]:
        if not draws:
            scheduler.advance(row)
        for each in draws:
            token, log_prob = next(drawn)
            scheduler.append(each, [token], [log_prob])
            reason = each.find_end(len(each.tokens) - 1, len(each.tokens), math.isfinite(log_prob))
            if reason is not None:
                scheduler.finish(each)
            if reason is not None or each.streams:
                events.append((each, reason))
    return events
