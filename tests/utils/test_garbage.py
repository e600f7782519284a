import gc

import pytest

from lockstep.utils.garbage import freeze_objects, frozen_objects, rare_collections


class Node:
    """In a circle with itself: only a collection frees it."""

    freed = 0

    def __init__(self):
        self.itself = self

    def __del__(self):
        Node.freed += 1


@pytest.fixture(autouse=True)
def none_freed(nothing_frozen):
    Node.freed = 0


def is_looked_at(thing):
    """Whether a full collection walks over it."""
    return any(one is thing for one in gc.get_objects())


def test_what_was_there_before_is_not_looked_at_and_is_again_afterwards():
    before = Node()
    assert is_looked_at(before)
    with frozen_objects():
        inside = Node()
        assert gc.get_freeze_count() > 1000
        assert is_looked_at(inside)
        assert not is_looked_at(before)
    assert gc.get_freeze_count() == 0
    assert is_looked_at(before)
    assert is_looked_at(inside)


def test_what_the_block_raises_passes_and_nothing_stays_frozen():
    with pytest.raises(ValueError, match="of the block"), frozen_objects():
        assert gc.get_freeze_count() > 1000
        raise ValueError("of the block")
    assert gc.get_freeze_count() == 0


def test_garbage_is_freed_not_kept_as_frozen():
    Node()
    with frozen_objects():
        assert Node.freed == 1


def test_garbage_that_is_made_inside_is_collected_inside():
    with frozen_objects():
        Node()
        gc.collect()
        assert Node.freed == 1


def test_what_becomes_garbage_inside_is_collected_afterwards():
    before = Node()
    with frozen_objects():
        del before
        gc.collect()
        assert Node.freed == 0
    gc.collect()
    assert Node.freed == 1


def test_the_outermost_block_ends_it():
    before = Node()
    with frozen_objects():
        with frozen_objects():
            pass
        with pytest.raises(ValueError, match="inner"), frozen_objects():
            raise ValueError("inner")
        assert not is_looked_at(before)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("freeze", [freeze_objects, gc.freeze], ids=["with ours", "with Python's own"])
def test_what_the_program_froze_stays_frozen(freeze):
    before = Node()
    freeze()
    with frozen_objects():
        pass
    assert not is_looked_at(before)


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize("before", [(700, 10, 10), (90_000, 5, 5), (0, 10, 10)])
def test_collections_are_rare_inside_and_as_before_afterwards(before):
    gc.set_threshold(*before)
    with pytest.raises(ValueError, match="inside"), rare_collections():
        first = gc.get_threshold()[0]
        assert first == 0 if before[0] == 0 else first >= 20_000  # 0: the program collects nothing by itself
        raise ValueError("inside")
    assert gc.get_threshold() == before


@pytest.mark.usefixtures("thresholds")
def test_garbage_is_collected_where_collections_are_rare():
    gc.set_threshold(700, 10, 10)
    with rare_collections():
        for _ in range(120_000):
            Node()
        assert Node.freed > 0
