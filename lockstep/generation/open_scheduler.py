"""OpenScheduler: a scheduler for requests that come and go. What one that is over has computed is left to others.

- A sample that may be continued (`keep`) leaves a turn: its pages, whole and begun, which a prompt that starts with its tokens begins with
  (`resume`). A turn is one more prompt that keeps pages while nobody runs it.
- Every sample leaves its whole pages to the prefix cache, where there is one, when its first token is known and again when it is over.
- When pages are short, the cache gives up first, then prompts and turns, the oldest first, then those that run.
"""

import math
from typing import Any

from lockstep.generation.pages import PagePool
from lockstep.generation.prefix_cache import PrefixCache
from lockstep.generation.scheduler import PENDING, Prompt, Sample, Scheduler


class OpenScheduler(Scheduler):
    """See Scheduler. With `in_one_shape` nothing is left to others."""

    def __init__(self, pool: PagePool, *args: Any, cache: PrefixCache | None = None, **options: Any) -> None:
        super().__init__(pool, *args, **options)
        self.cache = cache
        self._turns: dict[int, Prompt] = {}
        """What samples that may be continued have left, by their indices."""

    def ids_before(self, index: int) -> list[int] | None:
        """The tokens of a sample that was added with `keep`, if it has left a turn."""
        turn = self._turns.get(index)
        return None if turn is None else turn.ids

    def resume(self, prompt: Prompt, index: int) -> None:
        """A prompt that is about to be added starts with the tokens of a sample that was added with `keep`."""
        turn = self._turns.get(index)
        prompt.known = turn.known if turn is not None else None
        if turn is not None and turn.pages:
            self._keep(prompt, turn.pages, turn.num_kept)
            self._kept[turn] = self._kept.pop(turn)  # the youngest now
            self._give_begun_page(turn)

    def _give_begun_page(self, turn: Prompt) -> None:
        """Its last page, if it is not full, is the one's who goes on in it, who then needs no copy. Another computes those tokens again."""
        whole = turn.num_kept // self.pool.page_size
        begun = turn.pages[whole:]
        turn.pages = turn.pages[:whole]
        self._let_go(begun)
        turn.num_kept = whole * self.pool.page_size

    def release(self, index: int) -> None:
        """Nobody continues this sample any more."""
        turn = self._turns.pop(index, None)
        if turn is not None:
            self._drop(turn)

    def forget(self) -> None:
        """The weights have changed: nothing that was computed with the old ones is used again. What runs starts anew, with its tokens."""
        for sample in reversed(list(self.running)):
            self._preempt(sample)
        for prompt in list(self._kept):
            self._drop(prompt)
        if self.cache is not None:
            self.cache.clear()
        self.is_stale = False

    def append(self, sample: Sample, tokens: list[int], log_probs: list[float]) -> None:
        if not sample.tokens and tokens[0] != PENDING and math.isfinite(log_probs[0]):
            self.confirm(sample)
        super().append(sample, tokens, log_probs)

    def confirm(self, sample: Sample) -> None:
        """See Scheduler. Before this nobody may start with its pages: a number that is not finite spreads to tokens before it."""
        if self.cache is not None and sample.pages:
            sample.prompt.known = self.cache.insert(sample.prompt.ids, sample.pages, sample.prompt.known)

    def finish(self, sample: Sample) -> None:
        """See Scheduler. The pages stay until `settle`: the GPU's host takes a sample out before it knows the last tokens."""
        if sample.pages and (self.cache is not None or sample.keep) and not self.in_one_shape:
            sample.left = self.pool.share(sample.pages), sample.num_cached
            self.num_unsettled += 1
        super().finish(sample)

    def settle(self, sample: Sample, reason: str) -> None:
        if sample.left is None:
            return
        (pages, cached), sample.left = sample.left, None
        self.num_unsettled -= 1
        # Of a sample that was aborted before its first token nobody knows whether its numbers are finite.
        cached = min(cached, len(sample) - 1) if sample.tokens else 0
        if reason != "error":
            known = sample.prompt.known
            ids = sample.prompt.ids + sample.tokens
            whole = cached // self.pool.page_size
            if self.cache is not None and not self.cache.ends_with(known, whole):
                known = self.cache.insert(ids, pages[:whole], known)
            if sample.keep:
                turn = self._turns[sample.index] = Prompt(ids, known=known)
                self._keep(turn, pages[: self.pool.pages_for(cached)], cached)
        elif self.cache is not None:
            self.cache.forget(pages)
        self.pool.release(pages)

    def _start_of(self, sample: Sample) -> tuple[list[int], int]:
        pages, num_kept = super()._start_of(sample)
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

    def _num_idle(self, page: int) -> int:
        return super()._num_idle(page) + (self.cache is not None and page in self.cache)

    def _has_free(self, count: int) -> bool:
        missing = count - self.pool.num_free
        if missing > 0 and self.cache is not None:
            self.cache.evict(missing)
        return super()._has_free(count)

    def _drop_kept_pages(self, own: Prompt, missing: int) -> bool:
        evicted = self.cache is not None and self.cache.evict(missing)
        return evicted or super()._drop_kept_pages(own, missing)
