"""PrefixCache: pages by the tokens that they hold, so that a request which starts like an earlier one does not compute that again.

A tree. An edge is a page full of tokens, a node the page that holds their keys and values after all the tokens above it. The cache is one
more holder of its pages; those that nobody else holds are given up when pages are short, the one that was used longest ago first. What
follows from the tokens alone is all that is stored: when the weights change, the cache is cleared.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.generation.pages import SCRATCH, PagePool

_AT_ONCE = 16
"""One of so many pages is given up in one go: looking for them means looking at those that are in use."""


@dataclass(slots=True, eq=False)
class Node:
    """A page that is stored, or was."""

    page: int
    tokens: tuple[int, ...] = ()
    parent: Node | None = None
    depth: int = 0
    """Pages from the first to this one."""
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    used: int = 0
    """When it was last the end of what was asked for. Who uses it uses all that is above it, which is noted there when it is given up."""


class PrefixCache:
    """Over the pages of `pool`."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root = Node(SCRATCH)
        self._nodes: dict[int, Node] = {}
        """Page -> node."""
        self._clock = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def match(self, ids: Sequence[int], count: int | None = None, known: Node | None = None) -> list[int]:
        """The pages of the longest stored start of `ids`, in whole pages, at most `count`. The caller, if it wants them, shares them at
        once. `known`: see `insert`."""
        node: Node | None = self._last(ids, len(ids) // self._pool.page_size if count is None else count, known)
        self._touch(node)
        pages = []
        while node is not None and node is not self._root:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]

    def last_of(self, pages: Sequence[int]) -> Node | None:
        """Of the pages that `match` has just found: what `insert` takes as `known`."""
        return self._nodes[pages[-1]] if pages else None

    def insert(self, ids: Sequence[int], pages: Sequence[int], known: Node | None = None) -> Node | None:
        """Store the whole pages of `ids`, which `pages` hold. Where the same tokens are stored already, that page stays.

        Returns the last of these, None if there is none. `known` was returned for a start of `ids`: if it is still stored, so is all that
        comes before it, and only what follows is looked up.
        """
        size = self._pool.page_size
        count = min(len(pages), len(ids) // size)
        node = self._last(ids, count, known)
        for place, page in enumerate(self._pool.share(pages[node.depth : count]), node.depth):
            tokens = tuple(ids[place * size : (place + 1) * size])
            node.children[tokens] = node = self._nodes[page] = Node(page, tokens, node, place + 1)
        self._touch(node)
        return None if node is self._root else node

    def ends_with(self, known: Node | None, count: int) -> bool:
        """Whether `known`, which `insert` has returned, is still stored and the last of `count` pages: then there is nothing to insert."""
        return known is not None and known.depth == count and self._is_stored(known)

    def evict(self, count: int) -> bool:
        """Give up `count` pages that nobody else holds, or more, or as many as there are; whether there was one."""
        count = max(count, len(self._nodes) // _AT_ONCE)
        ends = [self._rank(node) for node in self._nodes.values() if not node.children and self._pool.writable(node.page)]
        heapq.heapify(ends)
        gone: list[int] = []
        while ends and len(gone) < count:
            node = self._nodes.pop(heapq.heappop(ends)[-1])
            gone.append(node.page)
            parent = self._cut(node)
            if parent is not self._root and not parent.children and self._pool.writable(parent.page):
                heapq.heappush(ends, self._rank(parent))
        self._pool.release(gone)
        return bool(gone)

    def forget(self, pages: Iterable[int]) -> None:
        """Give up those of `pages` that are stored, and all that was stored after them."""
        gone: list[Node] = []
        left = [node for page in pages if (node := self._nodes.get(page)) is not None]
        while left:
            node = left.pop()
            if self._is_stored(node):
                del self._nodes[node.page]
                gone.append(node)
                left += node.children.values()
        for node in sorted(gone, key=lambda node: -node.depth):
            self._cut(node)
        self._pool.release(node.page for node in gone)

    def clear(self) -> None:
        """Give all pages up."""
        self._pool.release(self._nodes)
        self._nodes.clear()
        self._root.children.clear()

    @staticmethod
    def _cut(node: Node) -> Node:
        """Take it from its parent, which was used whenever it was; returns the parent."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        parent.used = max(parent.used, node.used)
        return parent

    def _is_stored(self, node: Node) -> bool:
        return self._nodes.get(node.page) is node

    def _last(self, ids: Sequence[int], count: int, known: Node | None) -> Node:
        """The node of the longest stored start of `ids` of at most `count` pages; the root if there is none."""
        size = self._pool.page_size
        node = known if known is not None and self._is_stored(known) else self._root
        while node.depth > count:
            assert node.parent is not None
            node = node.parent
        for start in range(node.depth * size, count * size, size):
            child = node.children.get(tuple(ids[start : start + size]))
            if child is None:
                break
            node = child
        return node

    def _touch(self, node: Node | None) -> None:
        self._clock += 1
        if node is not None:
            node.used = self._clock

    @staticmethod
    def _rank(node: Node) -> tuple[int, int]:
        return node.used, node.page
