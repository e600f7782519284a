"""The key-value cache in pages: who holds which (PagePool, no tensors), and the memory behind them (KVCache).

A page holds the keys and values of `page_size` tokens of one sequence, in every layer. Sequences that start alike share pages; a page
with more than one holder is never written (see `writable`). Page 0 belongs to nobody: padding writes there. A token at position p is
stored in the sequence's page number p // page_size, at place p % page_size of it; its `slot` is page * page_size + place.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SCRATCH = 0
"""The page that padding writes to; it is never handed out."""


class PagePool:
    """`num_pages` pages of `page_size` tokens, the scratch page among them."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs 2 pages or more of 1 token or more, not {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
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

    def pages_for(self, num_tokens: int) -> int:
        """How many pages that many tokens need."""
        return -(-num_tokens // self.page_size)

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

    def num_holders(self, page: int) -> int:
        """How many hold it."""
        return self._holders[page]

    def writable(self, page: int) -> bool:
        """Whether its holder may write into it: it has no other. Else the holder takes a new page and copies (see the scheduler)."""
        return self._holders[page] == 1


@dataclass(frozen=True)
class CacheShape:
    """What one token's keys and values look like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kept: str = "auto"
    """`rollout.kv_cache_dtype`: auto is `dtype`; others have fewer bits."""

    @property
    def is_small(self) -> bool:
        """Whether keys and values have fewer bits than `dtype`."""
        return self.kept != "auto"

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        size = self.head_dim
        # Of a key and a value; where they have fewer bits, with 4 bytes for their scales.
        head = {"auto": 2 * size * self.dtype.itemsize, "fp8": 2 * size + 4}[self.kept]
        return self.num_layers * self.page_size * self.num_kv_heads * head


class KVCache:
    """The memory behind the pages: `pool` [layers, 2, num_pages, page_size, kv_heads, head_dim], keys at 0 and values at 1."""

    scales: Tensor | None = None  # of keys and values in fewer bits (Float8Cache)
    experts: Tensor | None = None
    """[num_pages, page_size, routers, k] int16: what the routers of a mixture chose for each token, where somebody wants to know."""

    def __init__(self, shape: CacheShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.num_pages = num_pages
        size = (shape.num_layers, 2, num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        # On a CPU nobody reads what was not written, and writing zeros takes as long as a dozen passes.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.pool = make(size, dtype=shape.dtype, device=device)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [num_pages, page_size, kv_heads, head_dim]: views of the pool."""
        return self.pool[number, 0], self.pool[number, 1]

    def copy_pages(self, copies: dict[int, int]) -> None:
        """Copy whole pages in every layer, all at once: target -> source."""
        if copies:
            targets, sources = torch.tensor([list(copies), list(copies.values())], device=self.pool.device)
            self.pool[:, :, targets] = self.pool[:, :, sources]


class Float8Cache(KVCache):
    """See KVCache. In memory the KV heads of a page follow each other, so that a head's tokens, which are read together, fill lines.

    `scales` [layers, num_pages, kv_heads, page_size, 2] bfloat16 are those of keys and values.
    """

    scales: torch.Tensor

    def __init__(self, shape: CacheShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.num_pages = num_pages
        size = shape.num_layers, 2, num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim
        # Zeros: what was never written may be multiplied by 0, and must be finite.
        self.pool = torch.zeros(size, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).transpose(3, 4)
        self.scales = torch.zeros(size[0], *size[2:5], 2, dtype=torch.bfloat16, device=device)
