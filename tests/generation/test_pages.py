import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.generation.pages import SCRATCH, CacheShape, KVCache, PagePool


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(1, 4), st.integers(0, 99)), max_size=60))
def test_a_page_is_free_exactly_when_nobody_holds_it(actions: list[tuple[str, int, int]]) -> None:
    """Against a list of holds kept beside it."""
    pool = PagePool(9, 4)
    holds: list[list[int]] = []
    for action, count, which in actions:
        if action == "take" and count <= pool.num_free:
            holds.append(pool.take(count))
        elif holds and action == "share":
            holds.append(pool.share(holds[which % len(holds)]))
        elif holds and action == "release":
            pool.release(holds.pop(which % len(holds)))
        held = [page for hold in holds for page in hold]
        assert SCRATCH not in held
        assert len(set(held)) == pool.capacity - pool.num_free
        for page in range(1, 9):
            assert pool._holders[page] == held.count(page)
            assert pool.writable(page) == (held.count(page) == 1)


def test_tokens_are_counted_in_whole_pages() -> None:
    pool = PagePool(4, 16)
    assert [pool.pages_for(n) for n in (0, 1, 16, 17, 48)] == [0, 1, 1, 2, 3]


def test_a_pool_without_a_page_beside_the_scratch_page_is_refused() -> None:
    with pytest.raises(ValueError, match="2 pages or more"):
        PagePool(1, 16)


def test_pages_are_copied_all_at_once() -> None:
    cache = KVCache(CacheShape(2, 3, 4, 5, torch.float32), 6, torch.device("cpu"))
    cache.pool.normal_()
    want = cache.pool[:, :, [0, 1, 1, 2, 4, 5]].clone()
    cache.copy_pages({2: 1, 3: 2})
    assert torch.equal(cache.pool, want)
    assert cache.pool.nbytes == 6 * cache.shape.page_bytes


def test_misuse_is_caught() -> None:
    pool = PagePool(3, 4)
    (page,) = pool.take(1)
    with pytest.raises(AssertionError, match="2 pages asked for, 1 free"):
        pool.take(2)
    pool.release([page])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([page])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share([page])
