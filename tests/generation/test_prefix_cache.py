"""The prefix cache against a plain list of what was stored."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.generation.pages import PagePool
from lockstep.generation.prefix_cache import Node, PrefixCache


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), size=st.sampled_from([1, 2, 4]))
def test_the_longest_stored_start_is_found_and_what_is_given_up_was_used_longest_ago(seed: int, size: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(200, size)
    cache = PrefixCache(pool)
    stored = dict[tuple[int, ...], int]()
    used = dict[tuple[int, ...], int]()
    held: list[int] = []
    known: list[tuple[list[int], Node | None]] = []
    for clock in range(40):
        ids = [rng.randrange(2) for _ in range(rng.randint(0, 5 * size))]
        whole = [tuple(ids[:end]) for end in range(size, len(ids) + 1, size)]
        if rng.random() < 0.5 and pool.num_free >= len(whole) + 1:
            pages = pool.take(pool.pages_for(len(ids)))
            # What an earlier call has returned for a start of these tokens changes nothing, whether or not it was given up since.
            starts = [node for start, node in known if ids[: len(start)] == start]
            last = cache.insert(ids, pages, rng.choice([None, *starts]))
            assert (last is None) == (not whole)
            known.append((ids, last))
            for start, page in zip(whole, pages, strict=False):
                stored.setdefault(start, page)
            pool.release(pages)
            used |= dict.fromkeys(whole, clock)
        elif rng.random() < 0.7:
            starts = [node for start, node in known if ids[: len(start)] == start]
            most = rng.choice([None, rng.randint(0, len(whole))])
            found = cache.match(ids, most, rng.choice([None, *starts]))
            expected = [stored[start] for start in whole[:most] if start in stored]
            assert found == expected
            used |= dict.fromkeys(whole[: len(found)], clock)
            if rng.random() < 0.2:
                held += pool.share(found)
        elif rng.random() < 0.3:
            gone = cache.match(ids)[-1:]
            cache.forget([*gone, 199])  # the last page is never stored here
            starts = [start for start, page in stored.items() if page in gone]
            for start in [own for own in stored if any(own[: len(start)] == start for start in starts)]:
                del stored[start]
            used |= dict.fromkeys([start for start in whole if start in stored], clock)
        else:
            before = set(stored)
            assert cache.evict(1) == any(stored[start] not in held for start in before if is_leaf(start, before, size))
            gone = {start for start in before if stored[start] not in cache}
            for start in gone:
                assert stored[start] not in held
                del stored[start]
            assert all(start[:-size] in stored for start in stored if len(start) > size)
            left = [used[start] for start in stored if is_leaf(start, set(stored), size) and stored[start] not in held]
            assert all(used[start] <= max(left, default=clock) for start in gone)
        assert len(cache) == len(stored)
    pool.release(held)
    cache.clear()
    assert pool.num_free == pool.capacity
    assert cache.match([0] * size) == []


def test_what_is_known_is_not_looked_up_again() -> None:
    """A conversation goes on: only its new pages are asked for."""
    pool = PagePool(200, 4)
    cache = PrefixCache(pool)
    asked = list[int]()

    class Tokens(list[int]):
        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            asked.append(key.start)
            return super().__getitem__(key)

    ids = list(range(400))
    pages = pool.take(110)
    known = cache.insert(Tokens(ids), pages)
    assert asked
    asked.clear()
    cache.insert(Tokens(ids + [1] * 40), pages, known)
    assert min(asked) == 400
    cache.clear()
    asked.clear()
    cache.insert(Tokens(ids), pages, known)
    assert min(asked) == 0
    assert cache.match(ids) == pages[:100]


def is_leaf(start: tuple[int, ...], stored: set[tuple[int, ...]], size: int) -> bool:
    return not any(len(other) == len(start) + size and other[: len(start)] == start for other in stored)
