"""GenerationLoop: feeds the captured decode step. The host plans a few steps ahead and reads results one interval late.

```text
  host     [plan i+1]  [read i]  [plan i+2]  [read i+1]
  device   ==== interval i ====|==== interval i+1 ====|==
```
An interval is up to `interval` decode steps. The scheduler is told the tokens of an interval when it is enqueued, as placeholders
(`PENDING`), so it plans as if nothing were late; reading fills them in. What ends by its length limit is known before it happens, and its
row and pages are given on at once; what ends by a stop is seen when its interval is read, and its row idles until then.

Everything that changes rows or pages is enqueued behind the steps that used them, so pages can be handed on as soon as the row that
held them has left the batch.
"""

from collections import deque
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.sampling import SamplingParams
from lockstep.generation.backend import Event, TakeAborts
from lockstep.generation.gpu.attention import copy_pages, group_limit, num_splits
from lockstep.generation.gpu.filters import make_filter
from lockstep.generation.gpu.prefill import PromptRows, upload
from lockstep.generation.gpu.rows import NOT_FINITE, RING, RUNNING, RowState, read_outputs
from lockstep.generation.gpu.runner import Decoder, DecodeRunner, bucket, buckets
from lockstep.generation.pages import KVCache
from lockstep.generation.scheduler import PENDING, PassRow, Sample, Scheduler
from lockstep.generation.scores import places_of, scored_rows, take_scores, with_drawn
from lockstep.observability.spans import running

_LONG = 1024
"""Contexts from which on they are cut into more parts."""
_WORTH_SHARING = 0.1
"""Shared prefixes are read together when that saves this share of all keys and values."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A sample in the batch on the device."""

    sample: Sample
    held: list[int]
    """The list of its pages: the scheduler makes a new one when it takes the pages away or gives others."""
    read: int
    """Tokens of the response that the host has."""
    sent: int
    """Tokens of the response that are on their way to the host, or there."""
    known: list[int] = field(default_factory=list)
    """Its row of the device's page table."""
    over: bool = False
    """Its end has been reported."""

    @property
    def goes_on(self) -> bool:
        """Whether the sample still has the pages that it was taken in with."""
        return self.sample.pages is self.held


@dataclass(slots=True)
class _Interval:
    """Outputs of the rows that were `entries`, on their way to the host: `RowState.outputs`, and where a request wants them ids and
    log-probs of the most likely tokens."""

    entries: list[_Entry]
    outputs: list[Tensor]
    ready: Any


class GenerationLoop:
    """Runs a scheduler's samples to their ends on `rows` and `cache`. The scheduler's lookahead is the length of an interval.

    `batch_invariant` decodes in the largest batch always and prefills each prompt alone, so that every product has the same shape, and
    rounds the same way, whatever else is generated. `sampling` is for samples without parameters of their own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        decoder: Decoder,
        runner: DecodeRunner,
        rows: RowState,
        cache: KVCache,
        batch_invariant: bool,
        sampling: SamplingParams,
    ) -> None:
        assert 0 < scheduler.lookahead < RING, f"the steps of an interval and a first token must fit into {RING} places"
        assert not scheduler.mixed
        assert bucket(scheduler.max_num_seqs) <= rows.capacity
        self._scheduler = scheduler
        self._decoder = decoder
        self._runner = runner
        self._rows = rows
        self._cache = cache
        self._batch_invariant = batch_invariant
        self._device = rows.token.device
        self._sampling = sampling
        rows.clear()
        self._batch: list[_Entry] = []
        """The sample of each row, from row 0. All rows after them are padding."""
        self._in_flight: deque[_Interval] = deque()
        self._group_limit = group_limit(decoder.num_heads, cache.shape.num_kv_heads)
        self._grouped: list[_Entry] | None = None
        """The entries that `RowState.shared` was made for."""
        self._shares = False
        self._options = _options(sampling)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._keep = make_filter(sampling)
        """What says which tokens may be drawn."""
        self._most_rows = 0
        """Rows that have been in use together so far."""
        self._is_special = self._keeps_top = False
        """Whether rows have parameters of their own or want more log-probs, and whether some want those of the most likely tokens."""

    def run(self, take_aborts: TakeAborts) -> Iterator[list[Event]]:
        """See Backend.run."""
        scheduler = self._scheduler
        while (not scheduler.is_idle or self._in_flight) and not scheduler.is_stale:
            yield self._settled(self._pass(take_aborts()))
        self._send_unsent()
        yield self._settled(self._read(leave=0))

    def _settled(self, events: Iterator[Event]) -> list[Event]:
        found = list(events)
        for sample, reason in found:
            if reason is not None:
                self._scheduler.settle(sample, reason)
        return found

    def _pass(self, aborts: Set[int]) -> Iterator[Event]:
        """Enqueue the next prefill or interval, and read what is ready."""
        scheduler = self._scheduler
        if aborts:
            yield from self._abort(aborts)
        planned = scheduler.plan()
        waits = not planned.rows
        if planned.copies:
            targets, sources = self._upload(np.array(list(planned.copies.items()), dtype=np.int64).T)
            copy_pages(self._cache.pool, sources, targets)
            if self._cache.scales is not None:
                copy_pages(self._cache.scales[:, None], sources, targets)
            if self._cache.experts is not None:
                self._cache.experts[targets] = self._cache.experts[sources]
        entries = {id(entry.sample): entry for entry in self._batch if entry.goes_on}
        leave = 1
        if planned.rows and all(id(row.sample) in entries for row in planned.rows):
            self._decode([entries[id(row.sample)] for row in planned.rows])
        elif planned.rows:
            if any(PENDING in row.sample.tokens for row in planned.rows):
                self._send_unsent()
                yield from self._read(leave=0)
                planned.rows = [row for row in planned.rows if row.sample.pages]
            for rows in [[row] for row in planned.rows] if self._batch_invariant else [planned.rows]:
                self._prefill(rows)
            leave = 2  # decoding goes on before the host waits for what was decoded before
        waits = waits or scheduler.is_idle
        if waits:
            self._move([])
        yield from self._read(leave=0 if waits else leave)

    def _abort(self, indices: Set[int]) -> Iterator[Event]:
        """End these samples with the tokens that they have; those that turn out to have ended already are reported as such."""
        self._send_unsent()
        yield from self._read(leave=0)
        for sample in self._scheduler.abort(indices):
            for entry in self._batch:
                entry.over |= entry.sample is sample
            yield sample, "abort"

    # -- enqueue -----------------------------------------------------------------------------------------------------------

    def _decode(self, entries: list[_Entry]) -> None:
        if len(entries) < len(self._batch):
            self._move([entry for entry in self._batch if entry.goes_on])
        assert len(entries) == len(self._batch), "a running sample was left out of a decoding pass"
        self._update_page_table()
        left = [entry.sample.limits.max_tokens - len(entry.sample.tokens) for entry in self._batch]
        count = min(self._scheduler.lookahead, max(left))
        self._most_rows = max(self._most_rows, len(entries))
        size = self._rows.capacity if self._batch_invariant else bucket(len(entries))
        shares = self._share_prefixes()
        # Only in a stream, as in `_prefill`.
        longest = 0 if self._scheduler.longest is None or self._batch_invariant else max(len(entry.sample) for entry in self._batch)
        self._runner.steps(size, count, self._keep, shares, self._keeps_top, longest >= _LONG and not shares)
        for entry, remaining in zip(list(self._batch), left, strict=True):
            self._promise(entry.sample, min(count, remaining))
        self._send_outputs()

    def _prefill(self, rows: list[PassRow]) -> None:
        if not rows:
            return
        page_size = self._cache.shape.page_size
        spans = [(row.sample, row.sample.num_cached, row.sample.num_cached + row.count) for row in rows]
        contexts = [start for _, start, _ in spans]
        lengths = [row.count for row in rows]
        packed = np.empty((3, sum(lengths)), dtype=np.int64)
        place = 0
        for (sample, start, end), length in zip(spans, lengths, strict=True):
            own = packed[:, place : place + length]
            place = place + length
            own[0], own[1], own[2] = sample.slice(start, end), np.arange(start, end), _slots(sample.pages, start, end, page_size)
        scored = scored_rows(rows) if any(row.sample.scores for row in rows) else []
        wanted = np.array([*(end - 1 for end in accumulate(lengths)), *places_of(scored)])
        short = self._runner.short
        # Only in a stream: a list of requests has the tokens that it always had, to the last bit.
        if (
            short is not None
            and self._scheduler.longest is not None
            and not self._batch_invariant
            and short.takes(lengths, contexts)
        ):
            logits = short.logits(packed, lengths, [sample.pages for sample, _, _ in spans], wanted)
        else:
            all_slots = [_slots(sample.pages, 0, end, page_size) for sample, _, end in spans] if any(contexts) else []
            key_slots = self._upload(np.concatenate(all_slots)) if all_slots else None
            layout = PromptRows(lengths, contexts, self._upload(wanted), key_slots)
            tokens, positions, slots = self._upload(packed)
            logits = self._decoder.prefill(tokens, positions, slots, layout)
        if scored:
            temperatures = [(row.sample.params or self._sampling).temperature for row in scored]
            take_scores(scored, logits[len(rows) :], temperatures)
        draws = [(number, sample) for number, row in enumerate(rows) for sample in row.draws]
        for row in rows:
            if not row.draws:
                self._scheduler.advance(row)
        if draws:
            first = self._entry([sample for _, sample in draws])
            numbers = [number for number, _ in draws]
            is_each = numbers == list(range(len(rows)))
            chosen = logits[: len(rows)] if is_each else logits[self._upload(np.array(numbers))]
            self._runner.draw(chosen, first, self._keep, self._keeps_top)
            for _, sample in draws:
                self._promise(sample, 1)
            if any(sample.streams for _, sample in draws):
                self._send_outputs()  # the first token is waited for

    def _promise(self, sample: Sample, count: int) -> None:
        """The sample will have `count` more tokens, unless it stops."""
        self._scheduler.append(sample, [PENDING] * count, [0.0] * count)
        if len(sample.tokens) >= sample.limits.max_tokens:
            self._scheduler.finish(sample)

    def _entry(self, samples: list[Sample]) -> int:
        """Rows for samples that begin, behind those that go on; returns the first. Their pages follow with the next decode."""
        self._move([entry for entry in self._batch if entry.goes_on])
        first = len(self._batch)
        self._batch += [_Entry(s, s.pages, read=len(s.tokens), sent=len(s.tokens)) for s in samples]
        if self._is_special or any(s.params is not None or s.scores is not None for s in samples):
            self._choose_steps()
        rows = self._rows
        here = slice(first, len(self._batch))
        # The draw adds one to the context: after it, all of the sample but the drawn token is in the cache.
        ints, floats = zip(*(self._numbers(s) for s in samples), strict=True)
        tokens = [(s.tokens or s.prompt.ids)[-1] for s in samples]
        rows.put(first, np.array([tokens, [s.key for s in samples]]), np.array(ints).T, np.array(floats).T)
        if rows.seen is not None and rows.counts is not None:
            rows.seen[here] = False  # while it was padding, the filter has marked the padding's token
            rows.counts[here] = 0
            for row, sample in enumerate(samples, first):
                if not (sample.params or self._sampling).penalises:
                    continue
                rows.seen[row, self._upload(np.array(sample.slice(0, len(sample))))] = True
                before = sample.tokens[:-1]
                if before:
                    rows.counts[row] = self._upload(np.bincount(before, minlength=rows.counts.shape[1])).short()
                if not sample.tokens:
                    rows.counts[row, sample.prompt.ids[-1]] = -1  # the filter will count it, and it is not of the response
        return first

    def _numbers(self, sample: Sample) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Its numbers in the order of INTS and of FLOATS."""
        (greedy, top_k), floats = self._options if sample.params is None else _options(sample.params)
        tokens = len(sample.tokens)
        limits = sample.limits
        stops = self._stop_ids <= limits.token_ids
        return (len(sample) - 1, tokens, limits.max_tokens, sample.position, RUNNING, greedy, stops, top_k), floats

    def _choose_steps(self) -> None:
        """Which filter the rows need, and whether the most likely tokens are noted. Called while there is something special about one."""
        samples = [entry.sample for entry in self._batch]
        rows = self._rows
        own = [sample.params for sample in samples if sample.params is not None]
        self._keep = make_filter(*own, *([] if own and len(own) == len(samples) else [self._sampling]))
        if rows.seen is None and any(params.penalises for params in own):
            self._runner.forget_filtered()
            rows.track_seen(True)
        self._keeps_top = any(sample.scores is not None and sample.scores.top for sample in samples)
        if self._keeps_top:
            rows.track_top()
        self._is_special = bool(own) or self._keeps_top

    def _update_page_table(self) -> None:
        """Tell the device which pages its rows have got."""
        changes: tuple[list[int], list[int], list[int]] = [], [], []  # row, column, page
        page_size = self._cache.shape.page_size
        for row, entry in enumerate(self._batch):
            known = entry.known
            held = entry.held
            # Only the page that the next token falls into can have been replaced, by a copy of its own.
            start = entry.sample.num_cached // page_size
            if start >= len(known) or known[start] == held[start]:
                start = len(known)
            if start < len(held):
                for whole, own in zip(changes, ([row] * (len(held) - start), range(start, len(held)), held[start:]), strict=True):
                    whole.extend(own)
                entry.known = list(held)
        if changes[0]:
            row_index, column_index, pages = self._upload(np.array(changes))
            self._rows.page_table[row_index, column_index] = pages.int()

    def _share_prefixes(self) -> bool:
        """Whether reading shared pages once pays for the rows as they are; if so, the device knows the groups."""
        if self._batch_invariant or num_splits(bucket(len(self._batch)), self._cache.shape.num_kv_heads) > 1:
            return False
        if self._grouped == self._batch:
            return self._shares
        self._grouped = list(self._batch)
        groups: list[tuple[int, int, int]] = []  # first row, rows, tokens
        page_size = self._cache.shape.page_size
        row = 0
        while row < len(self._batch):
            leader = self._batch[row]
            count = 1
            pages = len(leader.sample.prompt.ids) // page_size
            while pages and count < self._group_limit and row + count < len(self._batch):
                other = self._batch[row + count]
                if other.sample.prompt is not leader.sample.prompt or other.held[:pages] != leader.held[:pages]:
                    break
                count += 1
            if count > 1:
                groups.append((row, count, pages * page_size))
            row += count
        saved = sum((count - 1) * tokens for _, count, tokens in groups)
        self._shares = saved > _WORTH_SHARING * sum(len(entry.sample) for entry in self._batch)
        if self._shares:
            shared = self._rows.shared
            size = bucket(len(self._batch))
            tokens = np.zeros(size, dtype=np.int32)
            for first, count, length in groups:
                tokens[first : first + count] = length
            table = np.zeros((2, max(1, size // 2)), dtype=np.int32)
            table[:, : len(groups)] = np.array(groups, dtype=np.int32)[:, :2].T
            shared.first[: table.shape[1]], shared.size[: table.shape[1]] = self._upload(table)
            shared.tokens[:size] = self._upload(tokens)
        return self._shares

    def _move(self, entries: list[_Entry]) -> None:
        """Keep only `entries`, a part of the present ones in their order, in the first rows; the rows after them become padding."""
        if len(entries) == len(self._batch):
            return
        self._send_unsent()
        row_of = {id(entry): row for row, entry in enumerate(self._batch)}
        order = [row_of[id(entry)] for entry in entries]
        padding = bucket(len(self._batch)) - len(order)
        if order:
            self._rows.gather(self._upload(np.array(order + [self._rows.capacity] * padding, dtype=np.int64)))
        else:
            self._rows.clear(padding)
        self._batch = entries
        if self._is_special:
            self._choose_steps()

    def _send_unsent(self) -> None:
        if any(entry.sent < len(entry.sample.tokens) and not entry.over for entry in self._batch):
            self._send_outputs()

    def _send_outputs(self) -> None:
        rows = self._rows
        count = len(self._batch)
        outputs = [rows.outputs(count)]
        if self._keeps_top and rows.top_ids is not None and rows.top_log_probs is not None:
            outputs += [rows.top_ids[:count], rows.top_log_probs[:count]]
        ready = None
        if self._device.type == "cuda":
            outputs = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in outputs]
            ready = torch.cuda.Event()
            ready.record()
        else:
            outputs = [tensor.clone() for tensor in outputs]
        for entry in self._batch:
            entry.sent = len(entry.sample.tokens)
        self._in_flight.append(_Interval(list(self._batch), outputs, ready))

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(torch.from_numpy(np.ascontiguousarray(array)), self._device)

    def _prepare_smaller(self) -> None:
        """Use the time until the device has something to read: where rows have begun to leave, smaller batches will be needed."""
        if self._batch_invariant or not 0 < len(self._batch) < self._most_rows:
            return
        heads = self._cache.shape.num_kv_heads
        kinds = []
        for size in buckets(len(self._batch))[1:]:
            kinds.append((size, self._keep, self._shares and num_splits(size, heads) == 1, self._keeps_top, False))
        self._runner.prepare(kinds)

    # -- read --------------------------------------------------------------------------------------------------------------

    def _read(self, leave: int) -> Iterator[Event]:
        """Take in intervals, the oldest first, until `leave` are on their way."""
        while len(self._in_flight) > leave:
            interval = self._in_flight.popleft()
            if interval.ready is not None:
                if not interval.ready.query():
                    self._prepare_smaller()
                interval.ready.synchronize()
            read = read_outputs(interval.outputs[0], [entry.read for entry in interval.entries])
            for row, (entry, end, done, tokens, log_probs) in enumerate(zip(interval.entries, *read, strict=True)):
                sample = entry.sample
                start = entry.read
                if entry.over or end == start:
                    continue
                for one in running[-1:]:
                    one.written += end - start
                sample.tokens[start:end] = tokens[: end - start]
                sample.log_probs[start:end] = log_probs[: end - start]
                if sample.scores is not None and sample.scores.top:
                    _take_top(sample, start, end, *(tensor[row] for tensor in interval.outputs[1:]))
                entry.read = end
                left = len(sample.tokens) >= sample.limits.max_tokens  # it left the scheduler when its last token was promised
                reason = sample.find_end(start, end, done != NOT_FINITE)
                if not start and reason != "error":
                    self._scheduler.confirm(sample)
                if reason is None:
                    if sample.streams:
                        yield sample, None
                    continue
                if not left:
                    self._scheduler.finish(sample)
                entry.over = True
                yield sample, reason


def _options(params: SamplingParams) -> tuple[tuple[int, int], tuple[float, ...]]:
    """greedy and top_k; FLOATS. At temperature 0 the most likely token is taken, which no truncation drops."""
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if not params.temperature:
        return (1, -1), (1.0, 1.0, 0.0, *penalties)
    return (0, params.top_k), (1.0 / params.temperature, params.top_p, params.min_p, *penalties)


def _take_top(sample: Sample, start: int, end: int, ids: Tensor, log_probs: Tensor) -> None:
    """The most likely tokens at the places of its tokens from `start` to `end`, out of its row's ring."""
    assert sample.scores is not None
    for token in range(start, end):
        place = token % RING
        top = list(zip(ids[place].tolist(), log_probs[place].tolist(), strict=True))[: sample.scores.top]
        sample.scores.response.append(with_drawn(top, sample.tokens[token], sample.log_probs[token]))


def _slots(pages: list[int], start: int, end: int, page_size: int) -> np.ndarray:
    """[end - start] int64: where the tokens from `start` to `end` of a sample with these pages lie."""
    first = start // page_size
    places = np.asarray(pages[first : -(-end // page_size)], dtype=np.int64)[:, None] * page_size + np.arange(page_size)
    return places.reshape(-1)[start - first * page_size : end - first * page_size]
