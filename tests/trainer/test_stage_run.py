"""Rows of the next step are read beside the update of this one, and are those that would be read without it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from lockstep.data.schedule import PromptSchedule
from lockstep.errors import DataError
from lockstep.protocol import DataProto
from lockstep.trainer.stage_run import StageRun


class Numbers:
    """Rows that are their positions, and who read them."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken
        self.read_by: list[str] = []

    def __len__(self) -> int:
        return 12

    def batch(self, positions: Sequence[int]) -> DataProto:
        self.read_by.append(threading.current_thread().name)
        if self.broken in positions:
            raise DataError(f"rows.jsonl row {self.broken}: nothing of it is trained")
        return DataProto.from_dict({}, {"index": list(positions)})


class Reader(StageRun):
    """Its data, without workers."""

    def __init__(self, data: Numbers, total_steps: int = 4) -> None:
        self.train_data, self.schedule = data, PromptSchedule(12, 3, shuffle=True, seed=1)
        self.global_steps, self.total_steps, self.left_out, self._ahead = 0, total_steps, [], None

    def _metrics(self, batch: DataProto, measured: dict[str, float]) -> dict[str, float]:
        return measured

    def step(self) -> list[int]:
        """The rows of one step, whose update does nothing."""
        batch = self._train_batch()
        with self._reading_ahead():
            pass
        self.global_steps += 1
        return list(batch.non_tensor_batch["index"])


def test_each_step_has_the_rows_of_its_number_and_none_is_read_for_nothing() -> None:
    data = Numbers()
    reader = Reader(data)
    assert [reader.step() for _ in range(4)] == [reader.schedule.batch(number) for number in range(4)]
    assert [name.partition("_")[0] for name in data.read_by] == ["MainThread", "rows", "rows", "rows"]


def test_rows_that_were_read_ahead_are_dropped_when_their_batch_is_left_out() -> None:
    reader = Reader(Numbers())
    reader.step()
    reader.left_out = [1]
    assert reader.step() == reader.schedule.batch(2)
    assert reader.step() == reader.schedule.batch(3)


def test_a_run_that_begins_again_reads_from_where_it_begins() -> None:
    reader = Reader(Numbers())
    rows = [reader.step() for _ in range(3)]
    reader.global_steps = 1
    assert [reader.step(), reader.step()] == rows[1:]


def test_a_row_that_cannot_be_used_is_named_in_the_step_that_has_it() -> None:
    bad = Reader(Numbers()).schedule.batch(2)[1]
    reader = Reader(Numbers(broken=bad))
    reader.step()
    reader.step()
    for _ in range(2):  # asked again, it is read again
        with pytest.raises(DataError, match=f"rows.jsonl row {bad}"):
            reader.step()


def test_an_update_that_fails_leaves_no_thread_behind() -> None:
    reader: Any = Reader(Numbers())
    reader._train_batch()
    with pytest.raises(ValueError, match="update"), reader._reading_ahead():
        raise ValueError("update")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rows")]
