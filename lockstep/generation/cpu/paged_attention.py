"""One pass as tensors, and its attention over pages on a CPU; in plain PyTorch on any device, the reference for kernels that read pages.

On a CPU with a C compiler a compiled function reads the pages in place. Otherwise keys and values are gathered, one row after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.generation.cpu.kernels import Library, Pages, attention_blocks, check_type, library
from lockstep.generation.pages import KVCache
from lockstep.models.attention import Variant, causal_attention

if TYPE_CHECKING:
    from lockstep.generation.scheduler import Sample
    from lockstep.generation.scores import ScoredRow


@dataclass(slots=True)
class StepBatch:
    """One pass: new tokens of some rows, packed end to end. A decoding row has one; a row that is prefilled has a chunk of its prompt.

    Tensors are on the CPU. Legend: N tokens of the pass, R rows, S tokens to draw.
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
    draws: list[Sample] = field(default_factory=list)
    """[S]: for whom."""
    scored: list[ScoredRow] = field(default_factory=list)
    """Tokens of prompts whose log-probs are wanted."""


class PagedAttention:
    """Reads and writes one KVCache; see models.cached_attention.KeyValueCache. `begin` says what the next pass computes."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        in_place = cache.pool.device.type == "cpu" and cache.pool.dtype in (torch.float32, torch.bfloat16)
        self._library = library() if in_place else None

    def begin(self, batch: StepBatch) -> None:
        """The next calls of `attend` are the layers of this pass."""
        self._batch = batch
        self._slots = batch.slots.to(self._cache.pool.device)
        self._blocks: Tensor | None = None  # made by the first layer, which knows how many heads share a key

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
        pages = Pages(*self._cache.layer(layer))
        batch = self._batch
        if self._library is None:
            for target, new in ((pages.keys, k), (pages.values, v)):
                target.flatten(0, 1).index_copy_(0, self._slots, new)
            return self._one_row_at_a_time(q, pages, variant)[None]
        if self._blocks is None:
            self._blocks = attention_blocks(batch.query_lens, batch.context_lens.tolist(), q.shape[1] // k.shape[1])
        q, k, v = (x.float().contiguous() for x in (q, k, v))
        store(self._library, k, v, batch.slots, pages)
        return attend(self._library, q, pages, batch.page_table, self._blocks, variant)[None].to(query.dtype)

    def _one_row_at_a_time(self, query: Tensor, pages: Pages, variant: Variant) -> Tensor:
        """[N, H, D] from the queries [N, H, D] of the pass and the stored keys and values of their rows."""
        batch = self._batch
        outputs = []
        ends = (batch.context_lens + torch.tensor(batch.query_lens)).tolist()
        table = batch.page_table.to(query.device)
        for row, (q, end) in enumerate(zip(query.split(batch.query_lens), ends, strict=True)):
            own = table[row, : -(-end // pages.keys.shape[1])]
            k, v = (x.index_select(0, own).flatten(0, 1)[:end].transpose(0, 1)[None] for x in (pages.keys, pages.values))
            out = causal_attention(q.transpose(0, 1)[None], k, v, variant)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)


def attend(library: Library, q: Tensor, pages: Pages, table: Tensor, blocks: Tensor, variant: Variant) -> Tensor:
    """Attention of q [N, H, D] over what its rows have in `pages`, the new tokens included: [N, H, D]. `table` is [rows, width] int32."""
    check_type(torch.float32, q[0])
    check_type(torch.int32, table, blocks)
    _, heads, dim = q.shape
    out = torch.empty(q.shape)
    sinks = None if variant.sinks is None else variant.sinks.float().contiguous()
    scaling = dim**-0.5 if variant.scaling is None else variant.scaling
    shape = (q.stride(0), len(blocks), heads, pages.keys.shape[2], dim, table.shape[1], variant.sliding_window or 0, pages.half)
    library.call(
        "attention", q, pages.keys, pages.values, table, blocks, out, sinks, *shape, float(scaling), float(variant.softcap or 0.0)
    )
    return out


def store(library: Library, keys: Tensor, values: Tensor, slots: Tensor, pages: Pages) -> None:
    """Put keys and values [N, K, D], float32, into the pages at `slots` [N] int64.

    Raises ValueError for shapes that do not fit and slots outside the pages: the C function gets addresses only and would write there.
    """
    num_pages, page_size, heads, dim = pages.keys.shape
    if not keys.shape == values.shape == (len(slots), heads, dim) or pages.values.shape != pages.keys.shape:
        raise ValueError(
            f"keys {list(keys.shape)} and values {list(values.shape)} do not fit {len(slots)} slots in pages of {heads} heads of {dim}"
        )
    if not len(slots):
        return
    first, last = (int(x) for x in slots.aminmax())
    if first < 0 or last >= num_pages * page_size:
        raise ValueError(f"slots {first} to {last} are outside {num_pages} pages of {page_size} tokens")
    check_type(torch.float32, keys[0], values[0])
    check_type(torch.int64, slots)
    check_type(pages.keys.dtype, pages.keys, pages.values)
    assert len(keys) == 1 or keys.stride(0) == values.stride(0)
    library.call("store_keys_values", keys, values, slots, pages.keys, pages.values, keys.stride(0), *keys.shape, pages.half)
