"""Items exist when they are read, once."""

import pytest

from lockstep.workers.engine.base import LazySequence


def test_an_item_is_made_when_it_is_read_and_only_once() -> None:
    made: list[int] = []

    def make(index: int) -> int:
        made.append(index)
        return index * index

    items = LazySequence(5, make)
    assert (len(items), made) == (5, [])
    assert items[3] == 9
    assert items[-1] == 16
    assert made == [3, 4]
    assert list(items) == [0, 1, 4, 9, 16]
    assert items[1:3] == [1, 4]
    assert sorted(made) == [0, 1, 2, 3, 4]
    with pytest.raises(IndexError):
        items[5]
