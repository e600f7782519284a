"""The scheduler's rules once more, slow and plain, and a scheduler that is compared with them at every pass.

A page here is an object without a number; who holds it is found by looking at everybody. Nothing is counted beside what is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from helpers.fake_model import FakeModel
from lockstep.generation.pages import PagePool
from lockstep.generation.scheduler import Pass, PassRow, Prompt, Sample, Scheduler


class _Page:
    """A page."""


@dataclass(eq=False)
class _Plain:
    """One response in the making."""

    index: int
    prompt: Prompt
    max_tokens: int
    length: int
    """Tokens of prompt and response."""
    cached: int = 0
    decodes: bool = False
    pages: list[_Page] = field(default_factory=list)

    @property
    def fresh(self) -> bool:
        """Whether nothing has been drawn for it, ever."""
        return self.length == len(self.prompt.ids)


@dataclass
class _PlainPass:
    """What a pass must be: (index, cached tokens, new tokens, indices that start with it) for each row."""

    rows: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    copies: dict[_Page, _Page] = field(default_factory=dict)


class PlainScheduler:
    """See Scheduler."""

    def __init__(self, real: Scheduler) -> None:
        self.real, self.size, self.capacity = real, real.pool.page_size, real.pool.capacity
        self.waiting: list[_Plain] = []
        self.running: list[_Plain] = []
        self.kept: dict[Prompt, tuple[list[_Page], int]] = {}
        """Prompt -> its pages and how many tokens they hold; the oldest first."""
        self.not_yet: list[Prompt] = []
        """Prompts that the present pass computes."""

    def holders(self, page: _Page) -> int:
        return sum(page in s.pages for s in self.running) + sum(page in pages for pages, _ in self.kept.values())

    @property
    def used(self) -> set[_Page]:
        return {page for s in self.running for page in s.pages} | {page for pages, _ in self.kept.values() for page in pages}

    @property
    def free(self) -> int:
        return self.capacity - len(self.used)

    def find(self, index: int) -> _Plain:
        return next(s for s in (*self.running, *self.waiting) if s.index == index)

    def finish(self, index: int) -> None:
        sample = self.find(index)
        (self.running if sample in self.running else self.waiting).remove(sample)
        self._forget_unneeded()

    def plan(self) -> _PlainPass:
        made, budget, real, self.not_yet = _PlainPass(), self.real.max_num_batched_tokens, self.real, []
        if not real.mixed:
            self._prefill(made, budget)
        if not made.rows:
            for sample in [s for s in self.running if s.decodes]:
                left = len(sample.prompt.ids) + sample.max_tokens - 1 - sample.cached
                if sample in self.running and self._grow(sample, made, min(real.lookahead, left)):
                    made.rows.append((sample.index, sample.cached, 1, []))
            if real.mixed:
                self._prefill(made, budget - len(made.rows))
        return made

    def _prefill(self, made: _PlainPass, budget: int) -> None:
        for sample in [s for s in self.running if not s.decodes]:
            if budget > 0:
                budget -= self._row(sample, made, budget)
        while self.waiting and budget > 0 and len(self.running) < self.real.max_num_seqs:
            sample = self.waiting[0]
            if sample.prompt in self.not_yet or not self._can_start(sample):
                break
            while True:
                pages, tokens = self.kept.get(sample.prompt, ([], 0))
                cached = min(tokens, sample.length - 1)
                shared = pages[: -(-cached // self.size)]
                fresh = -(-sample.length // self.size) - len(shared) + (cached % self.size > 0)
                if fresh + len(self.running) <= self.free or not self._drop_one(sample.prompt):
                    break
            if fresh + len(self.running) > self.free:
                break
            sample.pages, sample.cached = list(shared), cached
            self._start(sample)
            assert self._grow(sample, made, sample.length - cached)
            budget -= self._row(sample, made, budget)

    def _row(self, sample: _Plain, made: _PlainPass, budget: int) -> int:
        count = min(sample.length - sample.cached, budget)
        followers: list[int] = []
        if sample.cached + count == sample.length and sample.fresh and sample.prompt not in self.kept:
            pages = sample.pages[: -(-sample.length // self.size)]
            while self.waiting and len(self.running) < min(self.real.max_num_seqs, self.free):
                other = self.waiting[0]
                if other.prompt is not sample.prompt or not other.fresh or not self._can_start(other):
                    break
                other.pages, other.cached = list(pages), len(sample.prompt.ids)
                self._start(other)
                followers.append(other.index)
            if any(s.prompt is sample.prompt for s in self.waiting) and not self.real.in_one_shape:
                self.kept[sample.prompt] = (pages, len(sample.prompt.ids))
                self.not_yet.append(sample.prompt)
        made.rows.append((sample.index, sample.cached, count, followers))
        return count

    def _can_start(self, sample: _Plain) -> bool:
        most = [-(-(len(s.prompt.ids) + s.max_tokens - 1) // self.size) for s in (sample, *self.running)]
        return not self.real.in_one_shape or sum(most) <= self.capacity

    def _start(self, sample: _Plain) -> None:
        self.waiting.remove(sample)
        self.running.append(sample)
        self._forget_unneeded()

    def _forget_unneeded(self) -> None:
        """Pages are kept for samples that wait."""
        for prompt in [p for p in self.kept if all(s.prompt is not p for s in self.waiting)]:
            del self.kept[prompt]

    def _grow(self, sample: _Plain, made: _PlainPass, count: int) -> bool:
        """Pages for `count` more tokens; False if the sample had to go."""
        first = sample.cached // self.size
        while True:
            copies = first < len(sample.pages) and self.holders(sample.pages[first]) > 1
            fresh = max(0, -(-(sample.cached + count) // self.size) - len(sample.pages))
            if fresh + copies <= self.free:
                break
            if not self._drop_one(sample.prompt):
                last = self.running[-1]
                self._preempt(last)
                if last is sample:
                    return False
        if copies:
            own = _Page()
            made.copies[own] = sample.pages[first]
            sample.pages[first] = own
        sample.pages += [_Page() for _ in range(fresh)]
        return True

    def _drop_one(self, own: Prompt) -> bool:
        """Another prompt's kept pages, if one of them becomes free by it; else the own ones."""
        for prompt, (pages, _) in self.kept.items():
            if prompt is not own and any(self.holders(page) == 1 for page in pages):
                del self.kept[prompt]
                return True
        return self.kept.pop(own, None) is not None

    def _preempt(self, sample: _Plain) -> None:
        """The whole pages of its prompt that others have too stay for it."""
        whole = [page for i, page in enumerate(sample.pages) if (i + 1) * self.size <= min(len(sample.prompt.ids), sample.cached)]
        if whole and sample.prompt not in self.kept and all(self.holders(page) > 1 for page in whole):
            self.kept[sample.prompt] = (whole, len(whole) * self.size)
        self.running.remove(sample)
        self.waiting.insert(0, sample)
        sample.pages, sample.cached, sample.decodes = [], 0, False


class CheckedPool(PagePool):
    """Tells the model which pages nobody holds any more."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model.num_pages, model.page_size)
        self.model = model

    def release(self, pages: Iterable[int]) -> None:
        given = list(pages)
        super().release(given)
        self.model.free(page for page in given if not self._holders[page])


class CheckedScheduler(Scheduler):
    """A Scheduler that does what PlainScheduler does, or raises AssertionError. Samples may arrive later than they are added."""

    def __init__(self, model: FakeModel, *args: Any, **options: Any) -> None:
        super().__init__(CheckedPool(model), *args, **options)
        self.plain, self.model = PlainScheduler(self), model
        self.arrives: dict[int, int] = {}
        """Index -> the pass before which it arrives; at once where there is none."""
        self._later: list[Sample] = []
        self._passes = 0

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not self._later

    def add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if self.arrives.get(sample.index, 0) > self._passes:
                self._later.append(sample)
                continue
            super().add([sample])
            self.plain.waiting.append(_Plain(sample.index, sample.prompt, sample.limits.max_tokens, len(sample)))

    def plan(self) -> Pass:
        self._passes += 1
        later, self._later = self._later, []
        if not self.running and not self.waiting:  # nothing else to do: the next ones arrive at once
            self.arrives.clear()
        self.add(later)
        expected, found = self.plain.plan(), super().plan()
        rows = [(r.sample.index, r.sample.num_cached, r.count, [f.index for f in r.followers]) for r in found.rows]
        assert rows == expected.rows
        self._check_state(expected.copies, found.copies)
        self.model.begin_pass(found.copies)
        return found

    def _check_state(self, expected_copies: dict[_Page, _Page], copies: dict[int, int]) -> None:
        """The same samples wait and run with the same pages, numbers apart; no page is held by anybody else."""
        plain = self.plain
        assert [s.index for s in self.waiting] == [s.index for s in plain.waiting]
        assert [s.index for s in self.running] == [s.index for s in plain.running]
        number: dict[_Page, int] = {}
        pairs = [(mine.pages, theirs.pages) for mine, theirs in zip(self.running, plain.running, strict=True)]
        assert list(self._keepers) == list(plain.kept)
        for prompt, (pages, tokens) in plain.kept.items():
            assert prompt.num_kept == tokens
            pairs.append((prompt.pages, pages))
        for mine, theirs in pairs:
            for own, other in zip(mine, theirs, strict=True):
                assert number.setdefault(other, own) == own
        assert len(set(number.values())) == len(number) == self.pool.capacity - self.pool.num_free
        assert all(self.pool._holders[own] == plain.holders(page) for page, own in number.items())
        # Who was preempted later in the plan has given up its copy, or the page that another has copied.
        for page, source in expected_copies.items():
            assert page not in number or number[page] in copies
            assert not {page, source} <= number.keys() or copies[number[page]] == number[source]

    def advance(self, row: PassRow) -> None:
        super().advance(row)
        self.plain.find(row.sample.index).cached += row.count

    def append(self, sample: Sample, tokens: list[int], log_probs: list[float]) -> None:
        super().append(sample, tokens, log_probs)
        plain = self.plain.find(sample.index)
        plain.length += len(tokens)
        plain.cached, plain.decodes = plain.length - 1, True

    def finish(self, sample: Sample) -> None:
        self.plain.finish(sample.index)
        super().finish(sample)
