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

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.workers.rollout.native.gpu.attention import copy_pages, group_limit, num_splits
from lockstep.workers.rollout.native.gpu.prefill import PackedRows
from lockstep.workers.rollout.native.gpu.rows import NOT_FINITE, RING, RUNNING, RowState
from lockstep.workers.rollout.native.gpu.runner import Decoder, DecodeRunner, Filter, bucket
from lockstep.workers.rollout.native.layout import KVCache
from lockstep.workers.rollout.native.scheduler import Row, Scheduler, Sequence

PENDING = -1
"""A token that is enqueued and not read yet."""

_WORTH_SHARING = 0.1
"""Shared prefixes are read together when that saves this share of all keys and values."""

FindStop = Callable[[Sequence, int], int | None]
"""(sequence, read before) -> how many of its tokens the response has if it ends among those read since; None if it goes on."""


@dataclass(slots=True, eq=False)
class _Seat:
    """A sequence on the device."""

    sequence: Sequence
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
        """Whether the sequence still has the pages that it was seated with."""
        return self.sequence.pages is self.held


@dataclass(slots=True)
class _Interval:
    """Outputs of the rows that were `seats`, on their way to the host: generated, done, tokens, log-probs."""

    seats: list[_Seat]
    outputs: list[Tensor]
    ready: Any


class GenerationLoop:
    """Runs a scheduler's sequences to their ends on `rows` and `cache`. The scheduler's lookahead is the length of an interval.

    `batch_invariant` decodes in the largest batch always and prefills each prompt alone, so that every product has the same shape, and
    rounds the same way, whatever else is generated.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        decoder: Decoder,
        runner: DecodeRunner,
        rows: RowState,
        cache: KVCache,
        batch_invariant: bool = False,
    ) -> None:
        assert 0 < scheduler.lookahead < RING, f"the steps of an interval and a first token must fit into {RING} places"
        assert not scheduler.mixed
        assert bucket(scheduler.max_num_seqs) <= rows.capacity
        self._scheduler, self._decoder, self._runner, self._rows, self._cache = scheduler, decoder, runner, rows, cache
        self._batch_invariant, self._device = batch_invariant, rows.token.device
        rows.clear()
        self._seats: list[_Seat] = []
        """The sequence of each row, from row 0. All rows after them are padding."""
        self._in_flight: deque[_Interval] = deque()
        heads = decoder.num_heads
        self._group_limit = group_limit(heads, cache.shape.num_kv_heads)
        self._grouped: list[_Seat] | None = None
        """The seats that `RowState.shared` was made for."""
        self._shares = False

    def run(
        self,
        keys: Mapping[int, int],
        find_stop: FindStop,
        keep: Filter | None = None,
        take_aborts: Callable[[], set[int]] = set,
    ) -> Iterator[tuple[Sequence, str]]:
        """(sequence, why it ended: stop, length, abort or error) as they end, until the scheduler is idle.

        `keys` has `sampling.request_keys` for each sequence's index. `take_aborts` is asked before each interval which sequences, by
        index, to end now. An error is a log-prob that is not finite, the last one.
        """
        scheduler = self._scheduler
        while not scheduler.is_idle or self._in_flight:
            aborts = take_aborts()
            if aborts:
                yield from self._abort(aborts, find_stop)
            plan = scheduler.plan()
            if plan.copies:
                targets, sources = self._upload(np.array(list(plan.copies.items()), dtype=np.int64).T)
                copy_pages(self._cache.pool, sources, targets)
            seats = {id(seat.sequence): seat for seat in self._seats if seat.goes_on}
            if plan.rows and all(id(row.sequence) in seats for row in plan.rows):
                self._decode([seats[id(row.sequence)] for row in plan.rows], keep)
            elif plan.rows:
                if any(PENDING in row.sequence.tokens for row in plan.rows):
                    self._send_unsent()
                    yield from self._read(find_stop, leave=0)
                    plan.rows = [row for row in plan.rows if row.sequence.pages]
                for rows in [[row] for row in plan.rows] if self._batch_invariant else [plan.rows]:
                    self._prefill(rows, keys, keep)
            if scheduler.is_idle:
                self._move([])
            yield from self._read(find_stop, leave=0 if scheduler.is_idle else 1)

    def _abort(self, indices: set[int], find_stop: FindStop) -> Iterator[tuple[Sequence, str]]:
        """End these sequences with the tokens that they have; those that turn out to have ended already are reported as such."""
        self._send_unsent()
        yield from self._read(find_stop, leave=0)
        for sequence in [s for s in (*self._scheduler.running, *self._scheduler.waiting) if s.index in indices]:
            self._scheduler.finish(sequence)
            for seat in self._seats:
                seat.over |= seat.sequence is sequence
            yield sequence, "abort"

    # -- enqueue -----------------------------------------------------------------------------------------------------------

    def _decode(self, seats: list[_Seat], keep: Filter | None) -> None:
        if len(seats) < len(self._seats):
            self._move([seat for seat in self._seats if seat.goes_on])
        assert len(seats) == len(self._seats), "a running sequence was left out of a decoding pass"
        self._update_page_table()
        left = [seat.sequence.max_tokens - len(seat.sequence.tokens) for seat in self._seats]
        count = min(self._scheduler.lookahead, max(left))
        size = self._rows.capacity if self._batch_invariant else bucket(len(seats))
        self._runner.steps(size, count, keep, self._share_prefixes())
        for seat, remaining in zip(list(self._seats), left, strict=True):
            self._promise(seat.sequence, min(count, remaining))
        self._send_outputs()

    def _prefill(self, rows: list[Row], keys: Mapping[int, int], keep: Filter | None) -> None:
        if not rows:
            return
        page_size = self._cache.shape.page_size
        spans = [(row.sequence, row.sequence.num_cached, row.sequence.num_cached + row.count) for row in rows]
        all_slots = [_slots(sequence.pages, end, page_size) for sequence, _, end in spans]
        packed = [
            np.concatenate([sequence.slice(start, end) for sequence, start, end in spans]),
            np.concatenate([np.arange(start, end) for _, start, end in spans]),
            np.concatenate([places[start:] for places, (_, start, _) in zip(all_slots, spans, strict=True)]),
        ]
        contexts = [start for _, start, _ in spans]
        key_slots = self._upload(np.concatenate(all_slots)) if any(contexts) else None
        layout = PackedRows([row.count for row in rows], contexts, key_slots, self._device)
        tokens, positions, slots = self._upload(np.stack(packed))
        logits = self._decoder.prefill(tokens, positions, slots, layout)
        draws = [(number, sequence) for number, row in enumerate(rows) for sequence in row.draws]
        for row in rows:
            if not row.draws:
                self._scheduler.advance(row)
        if draws:
            first = self._seat([sequence for _, sequence in draws], keys)
            self._runner.first_tokens(logits[self._upload(np.array([number for number, _ in draws]))], first, keep)
            for _, sequence in draws:
                self._promise(sequence, 1)

    def _promise(self, sequence: Sequence, count: int) -> None:
        """The sequence will have `count` more tokens, unless it stops."""
        self._scheduler.append(sequence, [PENDING] * count, [0.0] * count)
        if len(sequence.tokens) >= sequence.max_tokens:
            self._scheduler.finish(sequence)

    def _seat(self, sequences: list[Sequence], keys: Mapping[int, int]) -> int:
        """Rows for sequences that begin, behind those that go on; returns the first. Their pages follow with the next decode."""
        self._move([seat for seat in self._seats if seat.goes_on])
        first = len(self._seats)
        self._seats += [_Seat(s, s.pages, read=len(s.tokens), sent=len(s.tokens)) for s in sequences]
        rows, here = self._rows, slice(first, len(self._seats))
        # The draw adds one to the context: after it, all of the sequence but the drawn token is in the cache.
        numbers = [[len(s) - 1 for s in sequences], [len(s.tokens) for s in sequences], [s.max_tokens for s in sequences]]
        rows.context[here], rows.generated[here], rows.limit[here] = self._upload(np.array(numbers, dtype=np.int32))
        rows.key[here] = self._upload(np.array([keys[s.index] for s in sequences], dtype=np.int64))
        rows.token[here] = self._upload(np.array([(s.tokens or s.prompt.ids)[-1] for s in sequences], dtype=np.int64))
        rows.done[here] = RUNNING
        if rows.seen is not None:
            rows.seen[here] = False  # while it was padding, the filter has marked the padding's token
            for row, sequence in enumerate(sequences, first):
                rows.seen[row, self._upload(np.array(sequence.slice(0, len(sequence))))] = True
        return first

    def _update_page_table(self) -> None:
        """Tell the device which pages its rows have got."""
        changes: list[tuple[int, int, int]] = []
        page_size = self._cache.shape.page_size
        for row, seat in enumerate(self._seats):
            known, held = seat.known, seat.held
            # Only the page that the next token falls into can have been replaced, by a copy of its own.
            start = min(seat.sequence.num_cached // page_size, len(known))
            if start < len(known) and known[start] == held[start]:
                start = len(known)
            if not known:
                start = 0
            if start < len(held):
                changes += [(row, column, held[column]) for column in range(start, len(held))]
                seat.known = list(held)
        if changes:
            row_index, column_index, pages = self._upload(np.array(changes, dtype=np.int64).T)
            self._rows.page_table[row_index, column_index] = pages.int()

    def _share_prefixes(self) -> bool:
        """Whether reading shared pages once pays for the rows as they are; if so, the device knows the groups."""
        if self._batch_invariant or num_splits(bucket(len(self._seats)), self._cache.shape.num_kv_heads) > 1:
            return False
        if self._grouped == self._seats:
            return self._shares
        self._grouped = list(self._seats)
        groups: list[tuple[int, int, int]] = []  # first row, rows, tokens
        page_size, row = self._cache.shape.page_size, 0
        while row < len(self._seats):
            leader, count = self._seats[row], 1
            pages = len(leader.sequence.prompt.ids) // page_size
            while pages and count < self._group_limit and row + count < len(self._seats):
                other = self._seats[row + count]
                if other.sequence.prompt is not leader.sequence.prompt or other.held[:pages] != leader.held[:pages]:
                    break
                count += 1
            if count > 1:
                groups.append((row, count, pages * page_size))
            row += count
        saved = sum((count - 1) * tokens for _, count, tokens in groups)
        self._shares = saved > _WORTH_SHARING * sum(len(seat.sequence) for seat in self._seats)
        if self._shares:
            shared, size = self._rows.shared, bucket(len(self._seats))
            tokens = np.zeros(size, dtype=np.int32)
            for first, count, length in groups:
                tokens[first : first + count] = length
            table = np.zeros((2, max(1, size // 2)), dtype=np.int32)
            table[:, : len(groups)] = np.array(groups, dtype=np.int32)[:, :2].T
            shared.first[: table.shape[1]], shared.size[: table.shape[1]] = self._upload(table)
            shared.tokens[:size] = self._upload(tokens)
        return self._shares

    def _move(self, seats: list[_Seat]) -> None:
        """Keep only `seats`, a part of the present ones in their order, in the first rows; the rows after them become padding."""
        if len(seats) == len(self._seats):
            return
        self._send_unsent()
        row_of = {id(seat): row for row, seat in enumerate(self._seats)}
        order = [row_of[id(seat)] for seat in seats]
        padding = bucket(len(self._seats)) - len(order)
        self._rows.gather(self._upload(np.array(order + [self._rows.capacity] * padding, dtype=np.int64)))
        self._seats = seats

    def _send_unsent(self) -> None:
        if any(seat.sent < len(seat.sequence.tokens) and not seat.over for seat in self._seats):
            self._send_outputs()

    def _send_outputs(self) -> None:
        rows, count = self._rows, len(self._seats)
        outputs = [rows.generated[:count], rows.done[:count], rows.out_tokens[:count], rows.out_log_probs[:count]]
        ready = None
        if self._device.type == "cuda":
            outputs = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in outputs]
            ready = torch.cuda.Event()
            ready.record()
        else:
            outputs = [tensor.clone() for tensor in outputs]
        for seat in self._seats:
            seat.sent = len(seat.sequence.tokens)
        self._in_flight.append(_Interval(list(self._seats), outputs, ready))

    def _upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    # -- read --------------------------------------------------------------------------------------------------------------

    def _read(self, find_stop: FindStop, leave: int) -> Iterator[tuple[Sequence, str]]:
        """Take in intervals, the oldest first, until `leave` are on their way."""
        while len(self._in_flight) > leave:
            interval = self._in_flight.popleft()
            if interval.ready is not None:
                interval.ready.synchronize()
            generated, done, tokens, log_probs = (tensor.tolist() for tensor in interval.outputs)
            for row, seat in enumerate(interval.seats):
                sequence, start, end = seat.sequence, seat.read, generated[row]
                if seat.over or end == start:
                    continue
                places = [place % RING for place in range(start, end)]
                sequence.tokens[start:end] = [tokens[row][place] for place in places]
                sequence.log_probs[start:end] = [log_probs[row][place] for place in places]
                seat.read = end
                stop = find_stop(sequence, start)
                # The token whose log-prob is not finite is the last; a stop before it, which the device does not know of, counts first.
                finite = done[row] != NOT_FINITE or (stop is not None and stop < end)
                if stop is None and done[row] == RUNNING:
                    continue
                length = end if stop is None or not finite else stop
                if len(sequence.tokens) < sequence.max_tokens:  # else it has left the scheduler when its last token was promised
                    self._scheduler.finish(sequence)
                del sequence.tokens[length:], sequence.log_probs[length:]
                seat.over = True
                yield sequence, "error" if not finite else "length" if stop is None else "stop"


def _slots(pages: list[int], count: int, page_size: int) -> np.ndarray:
    """[count] int64: where the first `count` tokens of a sequence with these pages lie."""
    places = np.asarray(pages, dtype=np.int64)[:, None] * page_size + np.arange(page_size)
    return places.reshape(-1)[:count]
