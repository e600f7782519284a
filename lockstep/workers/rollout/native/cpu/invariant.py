"""InvariantBackend: every token is computed in the same shapes, whatever else is in the batch, so it is rounded alike in any batch.

A matrix product adds up in an order that depends on its shape, and a sum over keys on how many there are. Here a pass is cut into blocks
of a fixed number of tokens, padded with tokens that nobody reads; a token attends by itself over its keys in chunks of a fixed number, as
in decoding, even when it is part of a prompt; and tokens are drawn a row at a time. Then a prompt may be cut anywhere, a sequence may be
preempted and computed again, and the bits are the same.

Experts of a mixture see as many tokens as are routed to them, which depends on the others in the block: such models go token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.models.cached_attention import Variant
from lockstep.workers.rollout.native.cpu.backend import TorchBackend, draw_one_by_one
from lockstep.workers.rollout.native.cpu.paged import StepBatch
from lockstep.workers.rollout.native.pages import CacheShape, KVCache

BLOCK = 32
"""Tokens computed together."""
_KEYS = 64
"""Keys attended to at once; a multiple of the page size."""


class InvariantBackend(TorchBackend):
    """See Backend and the module's docstring."""

    def __init__(self, module: PreTrainedModel, shape: CacheShape, gpu_memory_utilization: float) -> None:
        super().__init__(module, shape, gpu_memory_utilization)
        config = module.config.get_text_config()
        experts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        self._block = 1 if any(experts) else BLOCK

    def forward(self, batch: StepBatch, logits_at: Tensor) -> Tensor:
        rows = torch.repeat_interleave(torch.arange(len(batch.query_lens)), torch.tensor(batch.query_lens))
        table = batch.page_table[rows]
        wanted = set(logits_at.tolist())
        kept: dict[int, Tensor] = {}
        for start in range(0, len(batch.input_ids), self._block):
            tokens = slice(start, start + self._block)
            missing = self._block - len(batch.input_ids[tokens])
            input_ids, positions, slots = (_pad(x[tokens], missing) for x in (batch.input_ids, batch.positions, batch.slots))
            assert isinstance(self._attention, _ChunkedAttention)
            self._attention.begin_block(slots, positions, torch.nn.functional.pad(table[tokens], (0, 0, 0, missing)))
            # The head, too, is computed for the whole block.
            logits = self._call(input_ids, positions, torch.arange(self._block))
            kept |= {start + i: logits[i] for i in range(self._block) if start + i in wanted}
        return torch.stack([kept[i] for i in logits_at.tolist()]) if wanted else torch.empty(0)

    def _make_attention(self, cache: KVCache) -> _ChunkedAttention:  # type: ignore[override]
        return _ChunkedAttention(cache)

    def _draw(self, logits: Tensor, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        return draw_one_by_one(logits, batch, sampling)


class _ChunkedAttention:
    """A KeyValueCache for blocks of tokens that each attend alone: softmax over chunks of keys, one chunk after the other.

    A chunk beyond a token's keys changes nothing, to the bit: its weights are exactly 0 and the correction of the others exactly 1.
    """

    def __init__(self, cache: KVCache) -> None:
        assert _KEYS % cache.shape.page_size == 0, f"{_KEYS} keys are not a whole number of pages of {cache.shape.page_size}"
        self._cache = cache

    def begin_block(self, slots: Tensor, positions: Tensor, table: Tensor) -> None:
        """The next calls of `attend` are the layers of this block: `slots`, `positions` [B] and page `table` [B, pages] of its tokens."""
        device, pages = self._cache.pool.device, _KEYS // self._cache.shape.page_size
        self._slots, self._positions = slots.to(device), positions.to(device)[:, None]
        used = int(positions.max()) // _KEYS + 1
        table = torch.nn.functional.pad(table.to(device).long(), (0, used * pages))
        self._chunks = [table[:, chunk * pages : (chunk + 1) * pages].flatten() for chunk in range(used)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        k_pages, v_pages = self._cache.layer(layer)
        k_pages.flatten(0, 1).index_copy_(0, self._slots, key[0].transpose(0, 1))
        v_pages.flatten(0, 1).index_copy_(0, self._slots, value[0].transpose(0, 1))
        q = query[0].transpose(0, 1).float()  # [B, H, D]
        block, heads, size = q.shape
        kv_heads = k_pages.shape[2]
        groups = heads // kv_heads
        q = q.reshape(block * kv_heads, groups, size) * (size**-0.5 if variant.scaling is None else variant.scaling)
        largest = q.new_full((block, kv_heads, groups, 1), -torch.inf)
        if variant.sinks is not None:
            largest = variant.sinks.float().view(1, kv_heads, groups, 1).expand_as(largest)
        total = torch.where(torch.isfinite(largest), 1.0, 0.0)
        out = q.new_zeros(block, kv_heads, groups, size)
        for number, pages in enumerate(self._chunks):
            k, v = (
                x.index_select(0, pages).view(block, _KEYS, kv_heads, size).transpose(1, 2).reshape(-1, _KEYS, size).float()
                for x in (k_pages, v_pages)
            )
            scores = torch.bmm(q, k.transpose(1, 2)).view(block, kv_heads, groups, _KEYS)
            if variant.softcap is not None:
                scores = variant.softcap * torch.tanh(scores / variant.softcap)
            places = torch.arange(number * _KEYS, (number + 1) * _KEYS, device=q.device)
            seen = places <= self._positions
            if variant.sliding_window is not None:
                seen &= places > self._positions - variant.sliding_window
            scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
            # What another request left in an unseen place may not be finite, and 0 times that is not 0.
            v = v.view(block, kv_heads, _KEYS, size).masked_fill(~seen[:, None, :, None], 0.0).view_as(v)
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            # Before its first visible key a token has no largest score; any finite number does.
            base = new.masked_fill(new == -torch.inf, 0.0)
            weights, correction = torch.exp(scores - base), torch.exp(largest - base)
            total = total * correction + weights.sum(-1, keepdim=True)
            out = out * correction + torch.bmm(weights.view(-1, groups, _KEYS), v).view_as(out)
            largest = new
        return (out / total).to(query.dtype).view(1, block, heads, size)


def _pad(x: Tensor, count: int) -> Tensor:
    """Zeros at the end: token 0 at position 0, stored in the scratch page."""
    return torch.nn.functional.pad(x, (0, count))
