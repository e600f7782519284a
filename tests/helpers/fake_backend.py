"""A CPU backend over a FakeModel, for tests of everything around it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from helpers.fake_model import FakeModel
from lockstep.generation.cpu.paged_attention import StepBatch
from lockstep.generation.cpu.passes import PassBackend


class FakeBackend(PassBackend):
    """See PassBackend: its loop alone."""

    def __init__(self, model: FakeModel, mixed: bool = True) -> None:
        self.model, self.page_size, self.num_pages, self.mixed = model, model.page_size, model.num_pages, mixed
        self.most_rows = 0
        self._invariant = False

    def ready(self) -> AbstractContextManager[None]:
        return nullcontext()

    def most_pages(self) -> int:
        return 1 << 20

    def open(self, num_pages: int) -> None:
        raise AssertionError("the model has its pages")

    def close(self) -> None:
        pass

    def copy_pages(self, copies: dict[int, int]) -> None:
        self.model.copy(copies)

    def forward(self, batch: StepBatch, logits_at: Tensor) -> Tensor:
        self.most_rows = max(self.most_rows, len(batch.query_lens))
        table = batch.page_table.tolist()
        rows = [table[row] for row, count in enumerate(batch.query_lens) for _ in range(count)]
        return self.model.logits(batch.input_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), rows, logits_at.tolist())
