"""PagePool: which pages of the key-value cache are free, and how many holders each of the others has. Bookkeeping only, no tensors.

A page holds the keys and values of `page_size` tokens of one sequence, in every layer. Sequences that start alike share pages; a page
with more than one holder is never written (see `writable`). Page 0 belongs to nobody: padding writes there.
"""

from __future__ import annotations

from collections.abc import Iterable

SCRATCH = 0
"""The page that padding writes to; it is never handed out."""


class PagePool:
    """`num_pages` pages of `page_size` tokens, the scratch page among them."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs 2 pages or more of 1 token or more, not {num_pages} of {page_size}")
        self.num_pages, self.page_size = num_pages, page_size
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, SCRATCH, -1))

    @property
    def capacity(self) -> int:
        """Pages that sequences can have, all together."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.capacity - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages that many tokens need."""
        return -(-num_tokens // self.page_size)

    def holders(self, page: int) -> int:
        """How many sequences hold the page."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """`count` free pages, the lowest numbers that were never used first; the caller is their only holder.

        The caller looks at `num_free` first: asking for more is a bug.
        """
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> list[int]:
        """The same pages for one more holder."""
        shared = list(pages)
        for page in shared:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1
        return shared

    def release(self, pages: Iterable[int]) -> None:
        """Give up one hold on each of `pages`; those without a holder are free again."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is released more often than it was taken"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def writable(self, page: int) -> bool:
        """Whether its holder may write into it: it has no other. Else the holder takes a new page and copies (see the scheduler)."""
        return self._holders[page] == 1
