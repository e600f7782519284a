"""Scheduler: which sequences run in the next pass, which wait, and who gives pages up when they are short. No tensors, no model.

Every sequence is in one state: waiting (no pages), or running (has a seat and pages). A running sequence has `num_cached` of its tokens
in the cache; the next pass computes some or all of the others, and a token is drawn when it reaches the end. So prefill, decoding and
recomputation after a preemption are one thing: decoding is the case of a single token that is not cached yet, in a sequence that has drawn
since it was admitted. One that has not (`is_decoding`) is still in prefill, even where a pass left it a single token.

- Samples of one prompt share its pages. The first to run computes the prompt; those that start with it draw from the same logits; those
  that find no seat yet get the prompt's pages later (the prompt holds them for them) and compute its last token again.
- A shared page is never written: before a sequence writes into one, it gets a copy of its own (`Plan.copies`).
- When pages are short, prompts that nobody runs give theirs up first, then the sequence that was admitted last goes back to the front of
  the queue and is computed again later. The sequence admitted first always goes on, so every request ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.workers.rollout.native.pages import PagePool


@dataclass(slots=True, eq=False)
class Prompt:
    """The tokens that some sequences start with."""

    ids: list[int]
    num_waiting: int = 0
    """Its sequences that are not running."""
    pages: list[int] = field(default_factory=list)
    """Pages that are kept for those."""
    num_kept: int = 0
    """How many tokens these hold."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One response in the making."""

    index: int
    """Which request it is."""
    prompt: Prompt
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    """The response so far."""
    log_probs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    """Of its tokens (prompt, then response), how many are in the cache."""
    is_decoding: bool = False
    """Whether it has drawn a token since it was admitted: until then its passes are prefill, however few tokens are left."""

    def __len__(self) -> int:
        return len(self.prompt.ids) + len(self.tokens)

    def slice(self, start: int, stop: int) -> list[int]:
        """Its tokens from `start` to `stop`, counted from the first token of the prompt."""
        length = len(self.prompt.ids)
        if start >= length:
            return self.tokens[start - length : stop - length]
        return self.prompt.ids[start:stop] + self.tokens[: max(stop - length, 0)]


@dataclass(frozen=True, slots=True)
class Row:
    """What a pass computes of one sequence: `count` tokens after those that are cached."""

    sequence: Sequence
    count: int
    followers: tuple[Sequence, ...] = ()
    """Samples of the same prompt that start in this pass: they draw from this row's last token too."""

    @property
    def draws(self) -> tuple[Sequence, ...]:
        """The sequences that get a token from this row: none while its prompt is not yet complete."""
        if self.sequence.num_cached + self.count < len(self.sequence):
            return ()
        return (self.sequence, *self.followers)


@dataclass(slots=True)
class Plan:
    """One pass."""

    rows: list[Row] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    """Page -> page it is a copy of. All copies are made at once, before the pass."""
    num_steps: int = 1
    """Most tokens that are drawn for each row: more than one only where every row decodes and has pages for them."""


class Scheduler:
    """Plans passes over a pool of pages. Call `plan`, compute it, say what came of each row (`advance`, `append`), `finish` what ended.

    `lookahead` is how many tokens a decoding pass draws for each row before anybody looks: pages are reserved for all of them. Without
    `mixed`, a pass is either prefill or decoding.
    """

    in_one_shape: bool = False
    """Whether a prompt is always computed from its first token, and a response a token at a time: nothing is computed again after a
    preemption, or from where another sample has left off. Then sequences run together only where all of them fit in full, shared pages
    counted for each."""

    def __init__(
        self, pool: PagePool, max_num_seqs: int, max_num_batched_tokens: int, lookahead: int = 1, mixed: bool = True
    ) -> None:
        self.pool, self.max_num_seqs, self.max_num_batched_tokens = pool, max_num_seqs, max_num_batched_tokens
        self.lookahead, self.mixed = lookahead, mixed
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order of admission."""
        self.num_preemptions = 0
        self._kept: dict[Prompt, None] = {}
        """The prompts that keep pages, the oldest first."""
        self._promised = 0
        """Pages that the running sequences can come to hold, shared ones counted for each."""

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences; those of one prompt should stand together."""
        for sequence in sequences:
            sequence.prompt.num_waiting += 1
            self.waiting.append(sequence)

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.waiting and not self.running

    def can_hold(self, num_prompt: int, max_tokens: int) -> bool:
        """Whether one such sequence, alone, fits into the pool. Only those that do may be added."""
        return self.pool.pages_for(num_prompt + max_tokens - 1) <= self.pool.capacity

    def plan(self) -> Plan:
        """The next pass. Its pages are reserved; sequences may have been preempted for it."""
        plan, budget = Plan(), self.max_num_batched_tokens
        if not self.mixed:
            self._prefill(plan, budget)
        if not plan.rows:
            for sequence in list(self.running):
                # Those without pages were preempted just now, for one that was admitted before them.
                if sequence.pages and sequence.is_decoding and self._extend(sequence, plan):
                    plan.rows.append(Row(sequence, 1))
            num_decoding = len(plan.rows)
            if self.mixed:
                self._prefill(plan, budget - num_decoding)
            plan.num_steps = self.lookahead if len(plan.rows) == num_decoding else 1
        assert plan.rows or self.is_idle, "nothing can run: a sequence that does not fit into the pool was let in"
        return plan

    def advance(self, row: Row) -> None:
        """The pass has cached the row's tokens, and drawn nothing from it."""
        row.sequence.num_cached += row.count

    def append(self, sequence: Sequence, tokens: list[int], log_probs: list[float]) -> None:
        """The pass has drawn these tokens for a sequence, and cached all but the last."""
        sequence.tokens += tokens
        sequence.log_probs += log_probs
        sequence.num_cached, sequence.is_decoding = len(sequence) - 1, True

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting."""
        if sequence.pages:
            self._end(sequence)
        else:
            self.waiting.remove(sequence)
            self._leave_queue(sequence)

    # -- prefill -----------------------------------------------------------------------------------------------------------

    def _prefill(self, plan: Plan, budget: int) -> None:
        """Add rows for prompts, the started ones first, within `budget` tokens."""
        for sequence in list(self.running):
            if not sequence.is_decoding and budget > 0:
                count = min(len(sequence) - sequence.num_cached, budget)
                plan.rows.append(self._row(sequence, count))
                budget -= count
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            count = self._admit(self.waiting[0], plan, budget)
            if not count:
                break
            budget -= count

    def _admit(self, sequence: Sequence, plan: Plan, budget: int) -> int:
        """Give the first waiting sequence a seat; returns how many tokens its row has, 0 if there are not enough pages.

        It gets pages for all of its tokens at once, even where the budget cuts them into several passes: no prefill is given up half-way.
        """
        prompt, pool = sequence.prompt, self.pool
        if not self._can_start(sequence):
            return 0
        while True:
            cached = min(prompt.num_kept, len(sequence) - 1)
            needed = pool.pages_for(len(sequence)) - pool.pages_for(cached) + bool(cached % pool.page_size)
            # One page is left for each running sequence: it will need it soon.
            if needed + len(self.running) <= pool.num_free:
                break
            if not self._drop_kept_pages(prompt):
                return 0
        self.waiting.popleft()
        sequence.pages = pool.share(prompt.pages[: pool.pages_for(cached)])
        sequence.num_cached = cached
        self._start(sequence)
        reserved = self._extend(sequence, plan, len(sequence) - cached)
        assert reserved, "its pages were counted"
        count = min(len(sequence) - cached, budget)
        plan.rows.append(self._row(sequence, count))
        return count

    def _row(self, sequence: Sequence, count: int) -> Row:
        """The row, with the waiting samples of its prompt that can start with it; keeps the prompt for those that cannot."""
        prompt = sequence.prompt
        if sequence.num_cached + count < len(sequence) or sequence.tokens or prompt.pages:
            return Row(sequence, count)
        pages = sequence.pages[: self.pool.pages_for(len(prompt.ids))]
        followers = []
        while self.waiting and len(self.running) < min(self.max_num_seqs, self.pool.num_free):
            other = self.waiting[0]
            if other.prompt is not prompt or other.tokens or not self._can_start(other):
                break
            self.waiting.popleft()
            other.pages, other.num_cached = self.pool.share(pages), len(prompt.ids)
            self._start(other)
            followers.append(other)
        if prompt.num_waiting and not self.in_one_shape:
            self._keep(prompt, pages, len(prompt.ids))
        return Row(sequence, count, tuple(followers))

    # -- pages -------------------------------------------------------------------------------------------------------------

    def _most_pages(self, sequence: Sequence) -> int:
        return self.pool.pages_for(len(sequence.prompt.ids) + sequence.max_tokens - 1)

    def _can_start(self, sequence: Sequence) -> bool:
        return not self.in_one_shape or self._promised + self._most_pages(sequence) <= self.pool.capacity

    def _extend(self, sequence: Sequence, plan: Plan, count: int | None = None) -> bool:
        """Reserve pages for `count` more tokens (None: for a decoding pass), all of them its own; False if it was preempted instead."""
        pool, start = self.pool, sequence.num_cached
        if count is None:
            count = min(self.lookahead, len(sequence.prompt.ids) + sequence.max_tokens - 1 - start)
        first = start // pool.page_size
        while True:
            # Only the page that the first new token falls into can be shared: those after it are new.
            copy = first < len(sequence.pages) and not pool.writable(sequence.pages[first])
            new = max(0, pool.pages_for(start + count) - len(sequence.pages))
            if new + copy <= pool.num_free:
                break
            if not self._drop_kept_pages(sequence.prompt):
                last = self.running[-1]
                self._preempt(last)
                if last is sequence:
                    return False
        if copy:
            shared = sequence.pages[first]
            (sequence.pages[first],) = pool.take(1)
            plan.copies[sequence.pages[first]] = shared
            pool.release([shared])
        sequence.pages += pool.take(new)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue, without pages. What it shares of its prompt's is kept for it: that frees nothing."""
        prompt, pool = sequence.prompt, self.pool
        assert not self.in_one_shape, "sequences run only where all of them fit"
        whole = sequence.pages[: min(len(prompt.ids), sequence.num_cached) // pool.page_size]
        if whole and not prompt.pages and not any(map(pool.writable, whole)):
            self._keep(prompt, whole, len(whole) * pool.page_size)
        self._end(sequence)
        prompt.num_waiting += 1
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _start(self, sequence: Sequence) -> None:
        self._leave_queue(sequence)
        self.running.append(sequence)
        self._promised += self._most_pages(sequence)

    def _end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._promised -= self._most_pages(sequence)
        self.pool.release(sequence.pages)
        sequence.pages, sequence.num_cached, sequence.is_decoding = [], 0, False

    def _leave_queue(self, sequence: Sequence) -> None:
        sequence.prompt.num_waiting -= 1
        if not sequence.prompt.num_waiting:
            self._drop(sequence.prompt)

    def _keep(self, prompt: Prompt, pages: list[int], num_tokens: int) -> None:
        prompt.pages, prompt.num_kept = self.pool.share(pages), num_tokens
        self._kept[prompt] = None

    def _drop(self, prompt: Prompt) -> None:
        self.pool.release(prompt.pages)
        prompt.pages, prompt.num_kept = [], 0
        self._kept.pop(prompt, None)

    def _drop_kept_pages(self, own: Prompt) -> bool:
        """Give up what one prompt keeps, if that frees a page; the prompt `own`, whose page may become writable by it, comes last."""
        for prompt in self._kept:
            if prompt is not own and any(map(self.pool.writable, prompt.pages)):
                self._drop(prompt)
                return True
        if own.pages:
            self._drop(own)
            return True
        return False
