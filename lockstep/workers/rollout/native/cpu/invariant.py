"""InvariantBackend: every token is computed in the same shapes, whatever else is in the batch, so it is rounded alike in any batch.

A matrix product adds up in an order that depends on its shape, and a sum over keys on how many there are. Here a pass is cut into blocks
of a fixed number of tokens, padded with tokens that nobody reads; a token attends by itself, as in decoding, even when it is part of a
prompt; and tokens are drawn a row at a time. Then a prompt may be cut anywhere, a sequence may be preempted and computed again, and the
bits are the same.

Experts of a mixture see as many tokens as are routed to them, which depends on the others in the block: such models go token by token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.native.cpu.backend import TorchBackend, draw_one_by_one
from lockstep.workers.rollout.native.cpu.paged import StepBatch
from lockstep.workers.rollout.native.pages import CacheShape

BLOCK = 32
"""Tokens computed together."""


class InvariantBackend(TorchBackend):
    """See Backend and the module's docstring."""

    def __init__(self, module: PreTrainedModel, shape: CacheShape, gpu_memory_utilization: float) -> None:
        super().__init__(module, shape, gpu_memory_utilization)
        config = module.config.get_text_config()
        experts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        self._block = 1 if any(experts) else BLOCK

    def forward(self, batch: StepBatch, logits_at: Tensor) -> Tensor:
        rows = torch.repeat_interleave(torch.arange(len(batch.query_lens)), torch.tensor(batch.query_lens))
        table, wanted = batch.page_table[rows], set(logits_at.tolist())
        kept: dict[int, Tensor] = {}
        for start in range(0, len(rows), self._block):
            tokens = slice(start, start + self._block)
            missing = self._block - len(rows[tokens])
            # Zeros at the end: token 0 at position 0, stored in the scratch page.
            ids, positions, slots = (F.pad(x[tokens], (0, missing)) for x in (batch.input_ids, batch.positions, batch.slots))
            pages = F.pad(table[tokens], (0, 0, 0, missing))
            alone = replace(
                batch,
                input_ids=ids,
                positions=positions,
                slots=slots,
                query_lens=[1] * self._block,
                context_lens=positions.int(),
                page_table=pages,
            )
            # The head, too, is computed for the whole block.
            logits = super().forward(alone, torch.arange(self._block))
            kept |= {start + i: logits[i] for i in range(self._block) if start + i in wanted}
        return torch.stack([kept[i] for i in logits_at.tolist()]) if wanted else torch.empty(0)

    def _draw(self, logits: Tensor, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        return draw_one_by_one(logits, batch, sampling)
