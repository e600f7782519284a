"""PrefixCache: pages by the tokens that they hold, so that a request which starts like an earlier one does not compute that again.

A tree. An edge is a page full of tokens, a node the page that holds their keys and values after all the tokens above it. The cache is one
more holder of its pages; those that nobody else holds are given up when pages are short, the one that was used longest ago first. What
follows from the tokens alone is all that is stored: when the weights change, the cache is cleared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.workers.rollout.native.pages import SCRATCH, PagePool

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


class PrefixCache:
    """Over the pages of `pool`."""

    def __init__(self, pool: PagePool) -> None:
        self._pool, self._root = pool, Node(SCRATCH)
        self._nodes: dict[int, Node] = {}
        """Page -> node, the one that was used longest ago first; a node stands before its parent."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def match(self, ids: Sequence[int]) -> list[int]:
        """The pages of the longest stored start of `ids`, in whole pages. The caller, if it wants them, shares them at once."""
        path = self._path(ids)
        self._touch(path)
        return [node.page for node in path]

    def last_of(self, pages: Sequence[int]) -> Node | None:
        """Of the pages that `match` has just found: what `insert` takes as `known`."""
        return self._nodes[pages[-1]] if pages else None

    def insert(self, ids: Sequence[int], pages: Sequence[int], known: Node | None = None) -> Node | None:
        """Store the whole pages of `ids`, which `pages` hold. Where the same tokens are stored already, that page stays.

        Returns the last of these, None if there is none. `known` was returned for a start of `ids`: if it is still stored, so is all that
        comes before it, and only what follows is looked up.
        """
        size, path = self._pool.page_size, self._path(ids, known)
        node, first = path[-1] if path else self._root, len(path)
        for place, page in enumerate(self._pool.share(pages[first : len(ids) // size]), first):
            tokens = tuple(ids[place * size : (place + 1) * size])
            node.children[tokens] = node = self._nodes[page] = Node(page, tokens, node, place + 1)
            path.append(node)
        self._touch(path)
        return path[-1] if path else None

    def ends_with(self, known: Node | None, count: int) -> bool:
        """Whether `known`, which `insert` has returned, is still stored and the last of `count` pages: then there is nothing to insert."""
        return known is not None and known.depth == count and self._nodes.get(known.page) is known

    def evict(self, count: int) -> bool:
        """Give up `count` pages that nobody else holds, or more, or as many as there are; whether there was one."""
        gone: list[int] = []
        count = max(count, len(self._nodes) // _AT_ONCE)
        for page, node in self._nodes.items():
            if len(gone) == count:
                break
            if not node.children and self._pool.writable(page):
                assert node.parent is not None
                del node.parent.children[node.tokens]
                gone.append(page)
        for page in gone:
            del self._nodes[page]
        self._pool.release(gone)
        return bool(gone)

    def forget(self, pages: Iterable[int]) -> None:
        """Give up those of `pages` that are stored, and all that was stored after them."""
        gone: list[int] = []
        left = [node for page in pages if (node := self._nodes.get(page)) is not None]
        while left:
            node = left.pop()
            if self._nodes.get(node.page) is node:
                assert node.parent is not None
                del self._nodes[node.page], node.parent.children[node.tokens]
                gone.append(node.page)
                left += node.children.values()
        self._pool.release(gone)

    def clear(self) -> None:
        """Give all pages up."""
        self._pool.release(self._nodes)
        self._nodes.clear()
        self._root.children.clear()

    def _path(self, ids: Sequence[int], known: Node | None = None) -> list[Node]:
        size, path = self._pool.page_size, self._down_to(known)
        node = path[-1] if path else self._root
        for start in range(len(path) * size, len(ids) - size + 1, size):
            child = node.children.get(tuple(ids[start : start + size]))
            if child is None:
                break
            path.append(node := child)
        return path

    def _down_to(self, node: Node | None) -> list[Node]:
        """The nodes from the first page to this one; none if it is no longer stored."""
        path: list[Node] = []
        if node is not None and self._nodes.get(node.page) is node:
            while node is not None and node is not self._root:
                path.append(node)
                node = node.parent
        return path[::-1]

    def _touch(self, path: list[Node]) -> None:
        for node in reversed(path):
            self._nodes[node.page] = self._nodes.pop(node.page)
