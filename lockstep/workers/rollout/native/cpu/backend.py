"""The CPU's backends compute a pass, wait for it, and look. TorchBackend goes through the Hugging Face module, on every device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.utils.memory import available_ram
from lockstep.workers.rollout.counted import uniforms
from lockstep.workers.rollout.native.backend import Backend, Event, TakeAborts
from lockstep.workers.rollout.native.cpu.linears import prepacked
from lockstep.workers.rollout.native.cpu.paged import PagedAttention, StepBatch
from lockstep.workers.rollout.native.pages import CacheShape, KVCache
from lockstep.workers.rollout.native.scheduler import Pass, Sample, Scheduler
from lockstep.workers.rollout.native.scores import places_of, scored_rows, take_scores, top_of, with_drawn
from lockstep.workers.rollout.sampling import sample

PAGE_SIZE = 16
"""Tokens per page on the CPU: little is lost in a last page that is not full, and a page is still copied in one stretch."""
RAM_SHARE = 0.5
"""Of the free memory of a CPU machine, how much the pages may take."""
BLOCK = 32
"""Tokens computed together where the same results are wanted in any batch."""
MOST_TOKENS = 512
"""Tokens of a pass on the CPU: with more, activations leave the cache between one operation and the next."""


def batch_of(planned: Pass, page_size: int) -> StepBatch:
    """The tensors of a pass."""
    input_ids: list[int] = []
    positions: list[int] = []
    sample_from: list[int] = []
    drawn: list[Sample] = []
    for row in planned.rows:
        start = row.sample.num_cached
        input_ids += row.sample.slice(start, start + row.count)
        positions += range(start, start + row.count)
        sample_from += [len(input_ids) - 1] * len(row.draws)
        drawn += row.draws
    query_lens = [row.count for row in planned.rows]
    most = max(len(row.sample.pages) for row in planned.rows)
    page_table = torch.tensor([row.sample.pages + [0] * (most - len(row.sample.pages)) for row in planned.rows], dtype=torch.int32)
    places = torch.tensor(positions)
    rows = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
    return StepBatch(
        input_ids=torch.tensor(input_ids),
        positions=places,
        slots=page_table[rows, places // page_size].long() * page_size + places % page_size,
        query_lens=query_lens,
        context_lens=torch.tensor([row.sample.num_cached for row in planned.rows], dtype=torch.int32),
        page_table=page_table,
        sample_from=torch.tensor(sample_from, dtype=torch.int64),
        draws=drawn,
        scored=scored_rows(planned.rows) if any(row.sample.scores for row in planned.rows) else [],
    )


class TorchBackend(Backend):
    """See Backend. Runs one pass after the other; each draws one token for a row that is complete.

    `shape` is what `probe.cache_shape` found in the module. With `invariant` every token is computed in the same shapes, whatever else is
    in the batch, so it is rounded alike in any batch. A matrix product adds up in an order that depends on its shape, and a sum over keys
    on how many there are. So a pass is cut into blocks of a fixed number of tokens, padded with tokens that nobody reads; a token attends
    by itself, as in decoding, even when it is part of a prompt; and tokens are drawn a row at a time. Then a prompt may be cut anywhere, a
    sequence may be preempted and computed again, and the bits are the same. Experts of a mixture see as many tokens as are routed to them,
    which depends on the others in the block: such models go token by token.
    """

    def __init__(self, module: PreTrainedModel, shape: CacheShape, gpu_memory_utilization: float, invariant: bool = False) -> None:
        self.module, self.shape, self.page_size = module, shape, shape.page_size
        self.most_tokens = MOST_TOKENS if module.device.type == "cpu" else None
        self._gpu_memory_utilization = gpu_memory_utilization
        self._cache: KVCache | None = None
        config = module.config.get_text_config()
        experts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        self._invariant, self._block = invariant, 1 if any(experts) else BLOCK

    @contextmanager
    def ready(self) -> Iterator[None]:
        with prepacked(self.module):
            yield

    def run(self, scheduler: Scheduler, sampling: SamplingParams, take_aborts: TakeAborts = set) -> Iterator[list[Event]]:
        while not scheduler.is_idle:
            if scheduler.is_stale:
                scheduler.forget()
                return
            events: list[Event] = [(sample, "abort") for sample in scheduler.abort(take_aborts())]
            planned = scheduler.plan()
            if planned.rows:
                self.copy_pages(planned.copies)
                batch = batch_of(planned, self.page_size)
                events += _take_in(scheduler, planned, *self.step(batch, sampling))
            for ended, reason in events:
                if reason is not None:
                    scheduler.settle(ended, reason)
            yield events

    def most_pages(self) -> int:
        device = self.module.device
        if device.type == "cuda":
            free = int(torch.cuda.mem_get_info(device)[0] * self._gpu_memory_utilization)
        else:
            free = int(available_ram() * RAM_SHARE)
        return free // self.shape.page_bytes

    def open(self, num_pages: int) -> None:
        self.close()
        self._cache = KVCache(self.shape, num_pages, self.module.device)
        self._attention = PagedAttention(self._cache)
        self.num_pages = num_pages

    def close(self) -> None:
        if self._cache is not None:
            del self._attention
        self._cache, self.num_pages = None, 0

    def copy_pages(self, copies: dict[int, int]) -> None:
        """Copy pages, all at once: target -> source."""
        assert self._cache is not None, "the backend is closed"
        self._cache.copy_pages(copies)

    def step(self, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        """Compute a pass and draw: tokens [S] int64 and log-probs [S] float32, not finite where the logits are not."""
        wanted = batch.sample_from
        if batch.scored:
            wanted = torch.cat([wanted, torch.tensor(places_of(batch.scored))])
        if not len(wanted):
            self.forward(batch, wanted)
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        # Samples of one prompt draw from the same logits: compute those once.
        distinct, inverse = wanted.unique(return_inverse=True)
        logits = self.forward(batch, distinct)
        if batch.scored or len(distinct) < len(inverse):
            logits = logits[inverse.to(logits.device)]
        if batch.scored:
            own = (row.sample.params or sampling for row in batch.scored)
            take_scores(batch.scored, logits[len(batch.draws) :], [params.temperature for params in own])
            logits = logits[: len(batch.draws)]
        if not batch.draws:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        tokens, log_probs = (x.cpu() for x in self._draw(logits, batch, sampling))
        for row, drawn in enumerate(batch.draws):
            if drawn.scores is not None and drawn.scores.top:
                top = top_of(logits[row], drawn.scores.top, (drawn.params or sampling).temperature)
                drawn.scores.response.append(with_drawn(top, int(tokens[row]), float(log_probs[row])))
        return tokens, log_probs

    def forward(self, batch: StepBatch, logits_at: Tensor) -> Tensor:
        """Compute a pass; the logits [S, vocabulary] of its tokens `logits_at` [S]."""
        if not self._invariant:
            # Without a token to draw, the head is still applied to one: no index means "all" to transformers.
            return self._logits(batch, logits_at if len(logits_at) else torch.zeros(1, dtype=torch.int64))
        rows = torch.repeat_interleave(torch.arange(len(batch.query_lens)), torch.tensor(batch.query_lens))
        whole = (batch.input_ids, batch.positions, batch.slots, batch.page_table[rows])
        wanted = set(logits_at.tolist())
        kept: dict[int, Tensor] = {}
        for start in range(0, len(rows), self._block):
            block = [x[start : start + self._block] for x in whole]
            # Zeros at the end: token 0 at position 0, stored in the scratch page.
            missing = self._block - len(block[0])
            ids, positions, slots, table = (F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) for x in block)
            none = torch.empty(0, dtype=torch.int64)
            alone = StepBatch(ids, positions, slots, [1] * self._block, positions.int(), table, none)
            logits = self._logits(alone, torch.arange(self._block))
            kept |= {start + i: logits[i] for i in range(self._block) if start + i in wanted}
        return torch.stack([kept[i] for i in logits_at.tolist()]) if wanted else torch.empty(0)

    def _logits(self, batch: StepBatch, keep: Tensor) -> Tensor:
        assert self._cache is not None, "the backend is closed"
        self._attention.begin(batch)
        device = self.module.device
        out = self.module(
            input_ids=batch.input_ids.to(device)[None],
            position_ids=batch.positions.to(device)[None],
            use_cache=False,
            kv_cache=self._attention,
            logits_to_keep=keep.to(device),
        )
        return out.logits[0]

    def _draw(self, logits: Tensor, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        if any(sample.params is not None for sample in batch.draws):
            return self._draw_each(logits, batch, sampling)
        return self._draw_alike(logits, batch, range(len(logits)), sampling)

    def _draw_each(self, logits: Tensor, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        """Rows that are drawn alike together."""
        groups: dict[tuple[object, ...], list[int]] = {}
        params = [sample.params or sampling for sample in batch.draws]
        for row, own in enumerate(params):
            groups.setdefault(tuple(getattr(own, name) for name in _OPTIONS), []).append(row)
        tokens, log_probs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        for rows in groups.values():
            tokens[rows], log_probs[rows] = (x.cpu() for x in self._draw_alike(logits[rows], batch, rows, params[rows[0]]))
        return tokens, log_probs

    def _draw_alike(self, logits: Tensor, batch: StepBatch, rows: Sequence[int], params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs of the draws `rows`, whose logits these are."""
        samples = [batch.draws[row] for row in rows]
        uniform = uniforms(*numbers_of(samples)).to(logits.device)
        size = 1 if self._invariant else len(logits)
        parts = [_sample(logits, uniform, samples, params, slice(row, row + size)) for row in range(0, len(logits), size)]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_probs for _, log_probs in parts])


_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


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
        **{name: getattr(params, name) for name in _OPTIONS},
    )


def _take_in(scheduler: Scheduler, planned: Pass, tokens: Tensor, log_probs: Tensor) -> list[Event]:
    """The scheduler learns what a pass has drawn; what came of it."""
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
