"""Scheduler: which samples run in the next pass, which wait, and who gives pages up when they are short. No tensors, no model.

A sample is one response in the making. It is in one state: waiting (no pages), or running (has pages). A running sample has
`num_cached` of its tokens in the cache; the next pass computes some or all of the others, and a token is drawn when it reaches the end. So
prefill, decoding and recomputation after a preemption are one thing: decoding is the case of a single token that is not cached yet, in a
sample that has drawn since it was admitted. One that has not (`is_decoding`) is still in prefill, even where a pass left it a single token.

- Samples of one prompt share its pages. The first to run computes the prompt; those that start with it draw from the same logits; those
  that cannot run yet get the prompt's pages later (the prompt holds them for them) and compute its last token again.
- A shared page is never written: before a sample writes into one, it gets a copy of its own (`Pass.copies`).
- A sample that may be continued (`keep`) leaves its pages, whole and begun, to a prompt that starts with its tokens (`resume`). What it
  leaves is one more prompt that keeps pages while nobody runs it.
- With a prefix cache, every sample leaves its whole pages to it when its first token is known and again when it ends.
- When pages are short, the cache gives up first, then prompts that nobody runs, the oldest first. Then the sample that was admitted last
  goes back to the front of the queue and is computed again later. The sample admitted first always goes on, so every request ends.
- Who came first is admitted first, however large it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.generation.pages import PagePool
from lockstep.generation.prefix_cache import Node, PrefixCache

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.config.sampling import SamplingParams
    from lockstep.generation.scores import Scores
    from lockstep.workers.rollout.request import Stopping

PENDING = -1
"""A token that is promised and not known yet: the GPU's host plans ahead of it."""
SCORED_COST = 4
"""A token of a prompt whose log-prob is wanted counts as so many of a pass: it has a row of logits, which is what takes memory."""


@dataclass(slots=True, eq=False)
class Prompt:
    """The tokens that some samples start with."""

    ids: list[int]
    num_waiting: int = 0
    """Its samples that are not running."""
    pages: list[int] = field(default_factory=list)
    """Pages that wait for these samples."""
    num_kept: int = 0
    """How many tokens these hold."""
    known: Node | None = None
    """Up to where the prefix cache is known to have its tokens."""


@dataclass(slots=True, eq=False)
class Sample:
    """One response in the making."""

    index: int
    """Which request it is."""
    prompt: Prompt
    limits: Stopping
    """When it ends."""
    key: int = 0
    """`counted.request_key` of its request."""
    tokens: list[int] = field(default_factory=list)
    """The response so far."""
    log_probs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    """Of its tokens (prompt, then response), how many are in the cache."""
    is_decoding: bool = False
    """Whether it has drawn a token since it was admitted: until then its passes are prefill, however few tokens are left."""
    params: SamplingParams | None = None
    """How its tokens are drawn; None: as those of the others."""
    position: int = 0
    """What the number of a token of the response is counted from, where its random number is made."""
    streams: bool = False
    """Whether somebody wants to hear of each token."""
    keep: bool = False
    """Whether it may be continued."""
    scores: Scores | None = None
    """Log-probs that it was asked for beside those of its tokens."""
    experts: Callable[[int], Tensor] | None = None
    """What gives the experts of so many of its tokens, after its end, where they are recorded (`Scheduler.read_experts`)."""
    left: tuple[list[int], int] | None = None
    """Pages that it held at its end, and how many tokens they hold, until its tokens are known."""

    def __len__(self) -> int:
        return len(self.prompt.ids) + len(self.tokens)

    @property
    def most_cached(self) -> int:
        """How many of its tokens can come to be in the cache: the last one is never computed."""
        return len(self.prompt.ids) + self.limits.max_tokens - 1

    @property
    def most_reused(self) -> int:
        """How many of its tokens need not be computed when they are in the cache: not the one that is drawn from, nor those that are
        wanted for log-probs."""
        return len(self) - 1 if self.scores is None else self.scores.most_reused(len(self) - 1)

    def slice(self, start: int, stop: int) -> list[int]:
        """Its tokens from `start` to `stop`, counted from the first token of the prompt."""
        length = len(self.prompt.ids)
        if start >= length:
            return self.tokens[start - length : stop - length]
        return self.prompt.ids[start:stop] + self.tokens[: max(stop - length, 0)]

    def find_end(self, start: int, stop: int, is_finite: bool) -> str | None:
        """Why the response ends among its tokens from `start` to `stop`; what it has after its end is cut off. None if it goes on.

        Without `is_finite` the last of them has a log-prob that is not: an error, unless the response ends before it.
        """
        found = self.limits.end(self.tokens, start, stop if is_finite else stop - 1) or (None if is_finite else (stop, "error"))
        if found is None:
            return None
        length, reason = found
        del self.tokens[length:], self.log_probs[length:]
        return reason


@dataclass(slots=True, eq=False)
class PassRow:
    """What a pass computes of one sample: `count` tokens after those that are cached."""

    sample: Sample
    count: int
    followers: tuple[Sample, ...] = ()
    """Samples of the same prompt that start in this pass: they draw from this row's last token too."""

    @property
    def draws(self) -> tuple[Sample, ...]:
        """The samples that get a token from this row: none while its prompt is not yet complete."""
        if self.sample.num_cached + self.count < len(self.sample):
            return ()
        return (self.sample, *self.followers)


@dataclass(slots=True)
class Pass:
    """One pass."""

    rows: list[PassRow] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    """Page -> page it is a copy of. All copies are made at once, before the pass."""


class Scheduler:
    """Plans passes over a pool of pages. Call `plan`, compute it, say what came of each row (`advance`, `append`), `finish` what ended.

    `lookahead` is how many tokens a decoding pass draws for each row before anybody looks: pages are reserved for all of them. Without
    `mixed`, a pass is either prefill or decoding.
    """

    in_one_shape: bool = False
    """Whether a prompt is always computed from its first token, and a response a token at a time: nothing is computed again after a
    preemption, or from where another sample has left off. Then samples run together only where all of them fit in full, shared pages
    counted for each."""
    is_stale: bool = False
    """Whether the weights have changed: whoever runs the passes takes in what was computed, and stops."""
    num_unsettled: int = 0
    """Samples that were taken out and hold pages until `settle`."""
    read_experts: Callable[[Sample], Callable[[int], Tensor]] | None = None
    """Called with each sample before it gives its pages up, where experts of a mixture are recorded."""
    longest: int | None = None
    """The most tokens that a sample can come to have; None: those that wait now are all there will be."""

    def __init__(
        self,
        pool: PagePool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        lookahead: int = 1,
        mixed: bool = True,
        *,
        cache: PrefixCache | None = None,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.lookahead = lookahead
        self.mixed = mixed
        self.cache = cache
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        """In the order of admission."""
        self.num_preemptions = 0
        self._keepers: dict[Prompt, None] = {}
        """The prompts that keep pages, the oldest first."""
        self._not_yet: set[Prompt] = set()
        """Those of them whose pages are filled by the pass that is being planned: nobody can go on from them before it is over."""
        self._promised = 0
        """Pages that the running samples can come to hold, shared ones counted for each."""
        self._num_keeping = [0] * pool.num_pages
        """Page -> prompts that keep it."""
        self._continuable: dict[int, Prompt] = {}
        """What samples that may be continued have left, by their indices."""

    def add(self, samples: Iterable[Sample]) -> None:
        """Queue samples; those of one prompt should stand together."""
        for sample in samples:
            sample.prompt.num_waiting += 1
            self.waiting.append(sample)

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.waiting and not self.running

    def can_hold(self, num_prompt: int, max_tokens: int) -> bool:
        """Whether one such sample, alone, fits into the pool. Only those that do may be added."""
        return self.pool.pages_for(num_prompt + max_tokens - 1) <= self.pool.capacity

    def plan(self) -> Pass:
        """The next pass. Its pages are reserved; samples may have been preempted for it. Without rows: all wait for `settle`."""
        made = Pass()
        budget = self.max_num_batched_tokens
        self._not_yet.clear()
        if not self.mixed:
            self._prefill(made, budget)
        if not made.rows:
            for sample in list(self.running):
                # Those without pages were preempted just now, for one that was admitted before them.
                if sample.pages and sample.is_decoding and (self._has_pages(sample) or self._extend(sample, made)):
                    made.rows.append(PassRow(sample, 1))
            if self.mixed:
                self._prefill(made, budget - len(made.rows))
        assert made.rows or self.is_idle or self.num_unsettled, (
            "nothing can run: a sample that does not fit into the pool was let in"
        )
        return made

    def advance(self, row: PassRow) -> None:
        """The pass has cached the row's tokens, and drawn nothing from it."""
        row.sample.num_cached += row.count

    def append(self, sample: Sample, tokens: list[int], log_probs: list[float]) -> None:
        """The pass has drawn these tokens for a sample, and cached all but the last."""
        is_confirmed = self.cache is not None and not sample.tokens and tokens[0] != PENDING and math.isfinite(log_probs[0])
        if is_confirmed:
            self.confirm(sample)
        sample.tokens += tokens
        sample.log_probs += log_probs
        sample.num_cached = len(sample.prompt.ids) + len(sample.tokens) - 1
        sample.is_decoding = True

    def confirm(self, sample: Sample) -> None:
        """The first token of a sample is known, and its log-prob is finite: so is all that was computed of its prompt.

        Before this nobody may start with its pages: a number that is not finite spreads to tokens before it.
        """
        if self.cache is not None and sample.pages:
            sample.prompt.known = self.cache.insert(sample.prompt.ids, sample.pages, sample.prompt.known)

    def finish(self, sample: Sample) -> None:
        """Take a sample out, running or waiting.

        What it leaves to others stays until `settle`: the GPU's host takes a sample out before it knows the last tokens.
        """
        if self.read_experts is not None and sample.pages and sample.num_cached:
            sample.experts = self.read_experts(sample)
        if sample.pages and (self.cache is not None or sample.keep) and not self.in_one_shape:
            sample.left = self.pool.share(sample.pages), sample.num_cached
            self.num_unsettled += 1
        if sample.pages:
            self._end(sample)
        else:
            self.waiting.remove(sample)
            self._leave_queue(sample)

    def settle(self, sample: Sample, reason: str) -> None:
        """All tokens of a sample that was taken out are known, and why it ended: others may use what it leaves."""
        if sample.left is None:
            return
        pages, cached = sample.left
        sample.left = None
        self.num_unsettled -= 1
        # Of a sample that was aborted before its first token nobody knows whether its numbers are finite.
        cached = min(cached, len(sample) - 1) if sample.tokens else 0
        if reason != "error":
            self._leave(sample, pages, cached)
        elif self.cache is not None:
            self.cache.forget(pages)
        self.pool.release(pages)

    def _leave(self, sample: Sample, pages: list[int], cached: int) -> None:
        """Leave the first `cached` tokens in `pages` to the prefix cache and to samples that continue this one."""
        known = sample.prompt.known
        ids = sample.prompt.ids + sample.tokens
        whole = cached // self.pool.page_size
        if self.cache is not None and not self.cache.ends_with(known, whole):
            known = self.cache.insert(ids, pages[:whole], known)
        if sample.keep:
            left = Prompt(ids, known=known)
            self._continuable[sample.index] = left
            self._keep(left, pages[: self.pool.pages_for(cached)], cached)

    def abort(self, indices: Set[int]) -> list[Sample]:
        """Take the samples of these requests out; returns those that there were."""
        found = [sample for sample in (*self.running, *self.waiting) if sample.index in indices] if indices else []
        for sample in found:
            self.finish(sample)
        return found

    # -- what samples leave to others --------------------------------------------------------------------------------------

    def ids_before(self, index: int) -> list[int] | None:
        """Return the tokens of a sample that was added with `keep`; None unless it has ended and is not released."""
        left = self._continuable.get(index)
        return None if left is None else left.ids

    def resume(self, prompt: Prompt, index: int) -> None:
        """Give a prompt that is about to be added, and starts with the tokens of the kept sample `index`, what that sample left."""
        left = self._continuable.get(index)
        prompt.known = left.known if left is not None else None
        if left is not None and left.pages:
            self._keep(prompt, left.pages, left.num_kept)
            self._keepers[left] = self._keepers.pop(left)  # the youngest now
            self._give_begun_page(left)

    def _give_begun_page(self, left: Prompt) -> None:
        """Take its last page from `left` if it is not full: who goes on in it then needs no copy. Another computes those tokens again."""
        whole = left.num_kept // self.pool.page_size
        begun = left.pages[whole:]
        left.pages = left.pages[:whole]
        self._let_go(begun)
        left.num_kept = whole * self.pool.page_size

    def release(self, index: int) -> None:
        """Forget what a kept sample left: no sample continues it any more."""
        left = self._continuable.pop(index, None)
        if left is not None:
            self._drop(left)

    def forget(self) -> None:
        """Forget all that was computed, because the weights have changed. What runs starts anew, with its tokens."""
        for sample in reversed(list(self.running)):
            self._preempt(sample)
        for prompt in list(self._keepers):
            self._drop(prompt)
        if self.cache is not None:
            self.cache.clear()
        self.is_stale = False

    # -- prefill -----------------------------------------------------------------------------------------------------------

    def _prefill(self, made: Pass, budget: int) -> None:
        """Add rows for prompts, the started ones first, within `budget` tokens."""
        for sample in list(self.running):
            if not sample.is_decoding and budget > 0:
                budget -= self._add_row(sample, made, budget)
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            cost = self._admit(self.waiting[0], made, budget)
            if not cost:
                break
            budget -= cost

    def _admit(self, sample: Sample, made: Pass, budget: int) -> int:
        """Let the first waiting sample run; return what its row costs of the budget, 0 if it has to wait.

        It gets pages for all of its tokens at once, even where the budget cuts them into several passes: no prefill is given up half-way.
        """
        prompt = sample.prompt
        pool = self.pool
        if prompt in self._not_yet or not self._can_start(sample):
            return 0
        while True:
            pages, kept = self._start_of(sample)
            cached = min(kept, sample.most_reused)
            needed = pool.pages_for(len(sample)) - pool.pages_for(cached) + bool(cached % pool.page_size)
            # One page is left for each running sample: it will need it soon.
            missing = needed + len(self.running) - pool.num_free
            if missing <= 0:
                break
            if not self._drop_kept_pages(prompt, missing):
                return 0
        self.waiting.popleft()
        sample.pages = pool.share(pages[: pool.pages_for(cached)])
        sample.num_cached = cached
        self._start(sample)
        reserved = self._extend(sample, made, len(sample) - cached)
        assert reserved, "its pages were counted"
        return self._add_row(sample, made, budget)

    def _start_of(self, sample: Sample) -> tuple[list[int], int]:
        """Pages that the sample can begin with, its prompt's or the prefix cache's, and how many of its tokens they hold."""
        pages = sample.prompt.pages
        num_kept = sample.prompt.num_kept
        size = self.pool.page_size
        if self.cache is None or sample.most_reused // size * size <= num_kept:  # it could not have more
            return pages, num_kept
        # Whole pages, and not the one of the last token: nothing of the cache is ever written.
        ids = sample.prompt.ids if not sample.tokens else sample.slice(0, sample.most_reused)
        found = self.cache.match(ids, sample.most_reused // size, sample.prompt.known)
        if not sample.tokens:
            sample.prompt.known = self.cache.last_of(found)
        num_found = len(found) * size
        return (found, num_found) if num_found > num_kept else (pages, num_kept)

    def _add_row(self, sample: Sample, made: Pass, budget: int) -> int:
        """Add the sample's next tokens within the budget; returns what they cost of it."""
        cost = 1 if sample.scores is None or not sample.scores.wants_prompt else SCORED_COST
        count = min(len(sample) - sample.num_cached, max(1, budget // cost))
        made.rows.append(self._row(sample, count))
        return count * cost

    def _row(self, sample: Sample, count: int) -> PassRow:
        """The row, with the waiting samples of its prompt that can start with it; keeps the prompt for those that cannot."""
        prompt = sample.prompt
        if sample.num_cached + count < len(sample) or sample.tokens or prompt.pages:
            return PassRow(sample, count)
        pages = sample.pages[: self.pool.pages_for(len(prompt.ids))]
        followers = []
        while self.waiting and len(self.running) < self.max_num_seqs and self._has_free(len(self.running) + 1):
            other = self.waiting[0]
            if other.prompt is not prompt or other.tokens or not self._can_start(other):
                break
            self.waiting.popleft()
            other.pages = self.pool.share(pages)
            other.num_cached = len(prompt.ids)
            self._start(other)
            followers.append(other)
        if prompt.num_waiting and not self.in_one_shape:
            self._keep(prompt, pages, len(prompt.ids))
            self._not_yet.add(prompt)
        return PassRow(sample, count, tuple(followers))

    # -- pages -------------------------------------------------------------------------------------------------------------

    def _most_pages(self, sample: Sample) -> int:
        return self.pool.pages_for(sample.most_cached)

    def _can_start(self, sample: Sample) -> bool:
        return not self.in_one_shape or self._promised + self._most_pages(sample) <= self.pool.capacity

    def _has_pages(self, sample: Sample) -> bool:
        """Whether a decoding pass needs no more pages for the sample than it has: most do not, and this is quicker than `_extend`."""
        pages = sample.pages
        start = sample.num_cached
        size = self.pool.page_size
        first = start // size
        return start + self.lookahead <= len(pages) * size and first < len(pages) and self.pool.writable(pages[first])

    def _extend(self, sample: Sample, made: Pass, count: int | None = None) -> bool:
        """Reserve pages for `count` more tokens (None: for a decoding pass), all of them its own; False if it was preempted instead."""
        pool = self.pool
        start = sample.num_cached
        if count is None:
            count = min(self.lookahead, sample.most_cached - start)
        first = start // pool.page_size
        while True:
            # Only the page that the first new token falls into can be shared: those after it are new.
            copy = first < len(sample.pages) and not pool.writable(sample.pages[first])
            new = max(0, pool.pages_for(start + count) - len(sample.pages))
            if new + copy <= pool.num_free:
                break
            if not self._drop_kept_pages(sample.prompt, new + copy - pool.num_free):
                last = self.running[-1]
                assert not self.in_one_shape, "samples run only where all of them fit"
                self._preempt(last)
                if last is sample:
                    return False
        if copy:
            shared = sample.pages[first]
            (sample.pages[first],) = pool.take(1)
            made.copies[sample.pages[first]] = shared
            pool.release([shared])
        sample.pages += pool.take(new)
        return True

    def _preempt(self, sample: Sample) -> None:
        """Back to the front of the queue, without pages. What it shares of its prompt's is kept for it: that frees nothing."""
        prompt = sample.prompt
        pool = self.pool
        whole = sample.pages[: min(len(prompt.ids), sample.num_cached) // pool.page_size]
        if whole and not prompt.pages and all(pool.num_holders(page) > 1 + self._num_idle(page) for page in whole):
            self._keep(prompt, whole, len(whole) * pool.page_size)
        self._end(sample)
        prompt.num_waiting += 1
        self.waiting.appendleft(sample)
        self.num_preemptions += 1

    def _start(self, sample: Sample) -> None:
        self._leave_queue(sample)
        self.running.append(sample)
        self._promised += self._most_pages(sample)

    def _end(self, sample: Sample) -> None:
        self.running.remove(sample)
        self._promised -= self._most_pages(sample)
        self.pool.release(sample.pages)
        sample.pages = []
        sample.num_cached = 0
        sample.is_decoding = False

    def _leave_queue(self, sample: Sample) -> None:
        sample.prompt.num_waiting -= 1
        if not sample.prompt.num_waiting:
            self._drop(sample.prompt)

    def _keep(self, prompt: Prompt, pages: list[int], num_tokens: int) -> None:
        prompt.pages = self.pool.share(pages)
        prompt.num_kept = num_tokens
        for page in pages:
            self._num_keeping[page] += 1
        self._keepers[prompt] = None

    def _drop(self, prompt: Prompt) -> None:
        self._let_go(prompt.pages)
        prompt.pages = []
        prompt.num_kept = 0
        self._keepers.pop(prompt, None)

    def _let_go(self, pages: list[int]) -> None:
        """A prompt no longer keeps these."""
        self.pool.release(pages)
        for page in pages:
            self._num_keeping[page] -= 1

    def _num_idle(self, page: int) -> int:
        """How many hold the page without running."""
        return self._num_keeping[page] + (self.cache is not None and page in self.cache)

    def _has_free(self, count: int) -> bool:
        missing = count - self.pool.num_free
        if missing > 0 and self.cache is not None:
            self.cache.evict(missing)
        return self.pool.num_free >= count

    def _drop_kept_pages(self, own: Prompt, missing: int) -> bool:
        """Give up pages that nobody runs with: of the prefix cache, else of one prompt; return False if there are none.

        The prompt `own`, whose page may become writable by it, comes last. A page is free when the last prompt that keeps it has given it
        up; `missing` are wanted.
        """
        if self.cache is not None and self.cache.evict(missing):
            return True
        for prompt in self._keepers:
            if prompt is not own and any(self.pool.num_holders(page) == self._num_idle(page) for page in prompt.pages):
                self._drop(prompt)
                return True
        if own.pages:
            self._drop(own)
            return True
        return False
