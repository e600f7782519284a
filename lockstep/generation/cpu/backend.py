"""TorchBackend: passes through the Hugging Face module, for every model that FusedBackend does not compute."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.generation.cpu.paged import PagedAttention, StepBatch
from lockstep.generation.cpu.passes import PassBackend
from lockstep.generation.cpu.prepacked import prepacked
from lockstep.generation.pages import CacheShape

BLOCK = 32
"""Tokens computed together where the same results are wanted in any batch."""


class TorchBackend(PassBackend):
    """See Backend. On any device.

    `shape` is what `probe.cache_shape` found in the module. With `invariant` every token is computed in the same shapes, whatever else is
    in the batch, so it is rounded alike in any batch. A matrix product adds up in an order that depends on its shape, and a sum over keys
    on how many there are. So a pass is cut into blocks of a fixed number of tokens, padded with tokens that nobody reads; a token attends
    by itself, as in decoding, even when it is part of a prompt; and tokens are drawn a row at a time. Then a prompt may be cut anywhere, a
    sequence may be preempted and computed again, and the bits are the same. Experts of a mixture see as many tokens as are routed to them,
    which depends on the others in the block: such models go token by token.
    """

    def __init__(self, module: PreTrainedModel, shape: CacheShape, gpu_memory_utilization: float, invariant: bool = False) -> None:
        super().__init__(module, shape, gpu_memory_utilization, invariant)
        config = module.config.get_text_config()
        experts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        self._block = 1 if any(experts) else BLOCK

    @contextmanager
    def ready(self) -> Iterator[None]:
        with prepacked(self.module):
            yield

    def open(self, num_pages: int) -> None:
        super().open(num_pages)
        assert self._cache is not None
        self._attention = PagedAttention(self._cache)

    def close(self) -> None:
        if self._cache is not None:
            del self._attention
        super().close()

    def forward(self, batch: StepBatch, logits_at: Tensor) -> Tensor:
        if not self._invariant:
            # Without a token to draw, the head is still applied to one: no index means "all" to transformers.
            return self._logits(batch, logits_at if len(logits_at) else torch.zeros(1, dtype=torch.int64))
        rows = torch.repeat_interleave(torch.arange(len(batch.query_lens)), torch.tensor(batch.query_lens))
        whole = (batch.input_ids, batch.positions, batch.slots, batch.page_table[rows])
        wanted = set(logits_at.tolist())
        kept: dict[int, Tensor] = {}
        for start in range(0, len(rows), self._block):
            block = [x[start : start + self._block] for x in whole]
            # Zeros at the end: token 0 at position 0, stored in the scratch page.
            missing = self._block - len(block[0])
            ids, positions, slots, table = (F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) for x in block)
            none = torch.empty(0, dtype=torch.int64)
            alone = StepBatch(ids, positions, slots, [1] * self._block, positions.int(), table, none)
            logits = self._logits(alone, torch.arange(self._block))
            kept |= {start + i: logits[i] for i in range(self._block) if start + i in wanted}
        return torch.stack([kept[i] for i in logits_at.tolist()]) if wanted else torch.empty(0)

    def _logits(self, batch: StepBatch, keep: Tensor) -> Tensor:
        assert self._cache is not None, "the backend is closed"
        self._attention.begin(batch)
        device = self.module.device
        out = self.module(
            input_ids=batch.input_ids.to(device)[None],
            position_ids=batch.positions.to(device)[None],
            use_cache=False,
            kv_cache=self._attention,
            logits_to_keep=keep.to(device),
        )
        return out.logits[0]
