"""An Scheduler that counts, at every pass, who holds each page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from helpers.fake_model import FakeModel
from helpers.plain_scheduler import CheckedPool
from lockstep.generation.prefix_cache import PrefixCache
from lockstep.generation.scheduler import Pass, Sample, Scheduler


class CheckedOpen(Scheduler):
    """Over the pages of a FakeModel, with or without a prefix cache."""

    def __init__(self, model: FakeModel, *args: Any, cached: bool) -> None:
        super().__init__(CheckedPool(model), *args)
        self.cache = PrefixCache(self.pool) if cached else None
        self.model = model
        self._seen: list[Sample] = []

    def add(self, samples: Iterable[Sample]) -> None:
        added = list(samples)
        self._seen += added
        super().add(added)

    def plan(self) -> Pass:
        found = super().plan()
        self.check()
        self.model.begin_pass(found.copies)
        return found

    def check(self) -> None:
        """Every page is held by those that have it, and by nobody else."""
        held: Counter[int] = Counter()
        for sample in self._seen:
            held.update(sample.pages)
            held.update(sample.left[0] if sample.left else [])
        for prompt in self._keepers:
            held.update(prompt.pages)
        held.update(list(self.cache._nodes) if self.cache is not None else [])
        assert all(self.pool.num_holders(page) == held[page] for page in range(1, self.pool.num_pages))
        assert self.pool.num_free == self.pool.capacity - len(held)
