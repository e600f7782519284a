"""One pass as tensors, and its attention over pages on a CPU; in plain PyTorch on any device, the reference for kernels that read pages.

On a CPU with a C compiler a compiled function reads the pages in place. Otherwise rows that are prefilled are computed one by one, without
padding, and rows that decode are gathered into padded blocks of similar length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.models.attention import causal_attention, masked_attention
from lockstep.models.cached_attention import Variant
from lockstep.workers.rollout.native.cpu.kernels import Pages, attend, attention_blocks, library, store
from lockstep.workers.rollout.native.pages import KVCache

_SHORTEST = 0.7
"""A block's shortest row has at least this share of its longest row's pages: less padding, but more calls, the nearer it is to 1."""


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
    keys: Tensor
    """[S] int64: `sampling.request_keys` of each draw's request."""
    response_positions: Tensor
    """[S] int64: which token of the response is drawn, from 0; with the key it decides the random number."""
    history: list[Tensor] | None = None
    """[S] of [seen tokens] int64: the request's prompt and response so far; only where a repetition penalty is asked for."""


@dataclass(slots=True)
class _Block:
    """Decoding rows of similar length."""

    tokens: slice
    """Which of the decoding tokens, in the order of `PagedAttention._order`."""
    pages: Tensor
    """[rows * pages a row] int64"""
    masks: dict[int | None, Tensor]
    """Sliding window -> [rows, 1, 1, length], True where a key is seen."""
    lengths: Tensor
    """[rows] keys of each row, the new one included."""
    past: Tensor
    """Places of the gathered block, rows end to end, that are behind their row's last key."""


class PagedAttention:
    """Reads and writes one KVCache; see models.cached_attention.KeyValueCache. `begin` says what the next pass computes."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        in_place = cache.pool.device.type == "cpu" and cache.pool.dtype in (torch.float32, torch.bfloat16)
        self._library = library() if in_place else None
        self._scratch: tuple[Tensor, Tensor] = (cache.pool.new_empty(0), cache.pool.new_empty(0))

    def begin(self, batch: StepBatch) -> None:
        """The next calls of `attend` are the layers of this pass."""
        device = self._cache.pool.device
        page_size = self._cache.shape.page_size
        self._slots = batch.slots.to(device)
        table, contexts = batch.page_table.to(device), batch.context_lens.tolist()
        if self._library is not None:
            self._batch = batch
            self._in_place: Tensor | None = None  # made by the first layer, which knows how many heads share a key
            return
        starts = [0]
        for count in batch.query_lens:
            starts.append(starts[-1] + count)
        decoding = sorted((contexts[row] + 1, row) for row, count in enumerate(batch.query_lens) if count == 1)
        self._order = torch.tensor([starts[row] for _, row in decoding], dtype=torch.int64, device=device)
        rows_of = torch.tensor([row for _, row in decoding], dtype=torch.int64, device=device)
        self._decode_table = table[rows_of]
        self._decode_lengths = torch.tensor([length for length, _ in decoding], dtype=torch.int32, device=device)
        self._blocks = []
        stop = len(decoding)
        while stop:
            width = -(-decoding[stop - 1][0] // page_size)
            start = stop - 1
            while start and decoding[start - 1][0] >= _SHORTEST * width * page_size:
                start -= 1
            part = slice(start, stop)
            lengths = self._decode_lengths[part]
            past = (torch.arange(width * page_size, device=device) >= lengths[:, None]).flatten().nonzero().flatten()
            self._blocks.append(_Block(part, self._decode_table[part, :width].flatten().long(), {}, lengths, past))
            stop = start
        self._prefills = [
            (slice(starts[row], starts[row + 1]), contexts[row], table[row, : -(-(contexts[row] + count) // page_size)].long())
            for row, count in enumerate(batch.query_lens)
            if count > 1
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        if self._library is not None:
            return self._attend_in_place(layer, query, key, value, variant)
        k_pages, v_pages = self._cache.layer(layer)
        new_k, new_v = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [N, KV, D]
        k_pages.flatten(0, 1).index_copy_(0, self._slots, new_k)
        v_pages.flatten(0, 1).index_copy_(0, self._slots, new_v)
        q = query[0].transpose(0, 1)  # [N, H, D]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if len(self._order):
            ordered = q.index_select(0, self._order)
            decoded = torch.empty_like(ordered)
            for block in self._blocks:
                decoded[block.tokens] = self._decode(block, ordered[block.tokens], k_pages, v_pages, variant)
            out.index_copy_(0, self._order, decoded)
        for tokens, context, pages in self._prefills:
            out[tokens] = self._prefill(q[tokens], new_k[tokens], new_v[tokens], context, pages, k_pages, v_pages, variant)
        return out[None]

    def _attend_in_place(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        assert self._library is not None
        q, k, v = (x[0].transpose(0, 1).float().contiguous() for x in (query, key, value))  # [N, heads, D]
        pages, batch = Pages(*self._cache.layer(layer)), self._batch
        if self._in_place is None:
            self._in_place = attention_blocks(batch.query_lens, batch.context_lens.tolist(), q.shape[1] // k.shape[1])
        store(self._library, k, v, batch.slots, pages)
        return attend(self._library, q, pages, batch.page_table, self._in_place, variant)[None].to(query.dtype)

    def _decode(self, block: _Block, q: Tensor, k_pages: Tensor, v_pages: Tensor, variant: Variant) -> Tensor:
        """q [R, H, D] -> [R, H, D]. The query heads that share a key head stand as its queries, so that keys are not repeated."""
        rows, heads, size = q.shape
        kv_heads = k_pages.shape[2]
        k, v = self._gather(block.pages, k_pages, v_pages, rows, block.past)
        length = k.shape[2]
        if variant.sliding_window not in block.masks:
            places = torch.arange(length, device=q.device)
            seen = places < block.lengths[:, None]
            if variant.sliding_window is not None:
                seen &= places >= block.lengths[:, None] - variant.sliding_window
            block.masks[variant.sliding_window] = seen[:, None, None]
        sinks = None if variant.sinks is None else variant.sinks.view(1, kv_heads, heads // kv_heads, 1)
        grouped = q.view(rows, kv_heads, heads // kv_heads, size)
        mask = block.masks[variant.sliding_window]
        return masked_attention(grouped, k, v, mask, variant.scaling, variant.softcap, sinks).reshape(rows, heads, size)

    def _prefill(
        self, q: Tensor, k: Tensor, v: Tensor, context: int, pages: Tensor, k_pages: Tensor, v_pages: Tensor, variant: Variant
    ) -> Tensor:
        """One row: q, k, v [M, heads, D] of its new tokens after `context` cached ones -> [M, H, D]."""
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        if context:
            length = context + k.shape[2]
            k, v = (x[:, :, :length] for x in self._gather(pages, k_pages, v_pages, 1))
        sinks = None if variant.sinks is None else variant.sinks.view(1, -1, 1, 1)
        out = causal_attention(q.transpose(0, 1)[None], k, v, variant.scaling, variant.sliding_window, variant.softcap, sinks)
        return out[0].transpose(0, 1)

    def _gather(
        self, pages: Tensor, k_pages: Tensor, v_pages: Tensor, rows: int, past: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of `pages` [rows * width] as [rows, KV, width * page_size, D], zeros at `past`: what another request left
        there may not be finite, and 0 times that is not 0. They lie in memory that the next call reuses: fresh memory for every block of
        every layer costs more than the copy itself."""
        shape = (len(pages), *k_pages.shape[1:])
        if self._scratch[0].numel() < shape[0] * k_pages[0].numel():
            size = shape[0] * k_pages[0].numel() * 5 // 4
            self._scratch = (k_pages.new_empty(size), v_pages.new_empty(size))
        gathered = []
        for scratch, source in zip(self._scratch, (k_pages, v_pages), strict=True):
            target = scratch[: shape[0] * k_pages[0].numel()].view(shape)
            torch.index_select(source, 0, pages, out=target)
            if past is not None:
                target.flatten(0, 1).index_fill_(0, past, 0)
            gathered.append(target.view(rows, -1, *shape[2:]).transpose(1, 2))
        return gathered[0], gathered[1]
