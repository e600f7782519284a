"""What one pass through the model computes, and where keys and values lie. The runners of all devices read these.

A token at position p of a row is stored in page `page_table[row, p // page_size]`, at place `p % page_size` of it; its `slot` is
`page * page_size + place`. Legend: N tokens of the pass, R rows (sequences) of the pass, S tokens to draw, k tokens drawn a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token's keys and values look like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        return 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """The memory behind the pages: `pool` [layers, 2, num_pages, page_size, kv_heads, head_dim], keys at 0 and values at 1."""

    def __init__(self, shape: CacheShape, num_pages: int, device: torch.device) -> None:
        self.shape, self.num_pages = shape, num_pages
        size = (shape.num_layers, 2, num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.pool = torch.zeros(size, dtype=shape.dtype, device=device)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [num_pages, page_size, kv_heads, head_dim]: views of the pool."""
        return self.pool[number, 0], self.pool[number, 1]

    def copy_pages(self, copies: dict[int, int]) -> None:
        """Copy whole pages in every layer, all at once: target -> source."""
        if copies:
            targets, sources = torch.tensor([list(copies), list(copies.values())], device=self.pool.device)
            self.pool[:, :, targets] = self.pool[:, :, sources]


@dataclass(slots=True)
class StepBatch:
    """One pass: new tokens of some rows, packed end to end. A decoding row has one; a row that is prefilled has a chunk of its prompt.

    Tensors are on the CPU; a runner takes them to its device.
    """

    input_ids: Tensor
    """[N] int64"""
    positions: Tensor
    """[N] int64: each token's place in its sequence."""
    slots: Tensor
    """[N] int64: where its key and value go."""
    query_lens: list[int]
    """[R]: new tokens of each row; they add up to N."""
    context_lens: Tensor
    """[R] int32: tokens of the row that are in the cache before this pass."""
    page_table: Tensor
    """[R, most pages] int32: the row's pages in order, then zeros (the scratch page)."""
    sample_from: Tensor
    """[S] int64: the token of the pass whose logits a draw is from. Samples of one prompt name the same token."""
    keys: Tensor
    """[S] int64: `sampling.request_keys` of each draw's request."""
    response_positions: Tensor
    """[S] int64: which token of the response is drawn, from 0; with the key it decides the random number."""
    num_steps: int = 1
    """k: tokens to draw for each row. Above 1, every row has one new token and one draw, in the rows' order (S = R = N), and pages for
    k tokens, or for as many as it may still have."""
    history: list[Tensor] | None = None
    """[S] of [seen tokens] int64: the request's prompt and response so far; only where a repetition penalty is asked for."""
