"""The CPU's backends compute a pass, wait for it, and look. TorchBackend goes through the Hugging Face module, on every device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.observability.spans import running
from lockstep.utils.memory import available_ram
from lockstep.workers.rollout.counted import uniforms
from lockstep.workers.rollout.native.backend import Backend, TakeAborts
from lockstep.workers.rollout.native.cpu.linears import prepacked
from lockstep.workers.rollout.native.cpu.paged import PagedAttention, StepBatch
from lockstep.workers.rollout.native.pages import CacheShape, KVCache
from lockstep.workers.rollout.native.scheduler import Pass, Sample, Scheduler
from lockstep.workers.rollout.sampling import sample

PAGE_SIZE = 16
"""Tokens per page on the CPU: little is lost in a last page that is not full, and a page is still copied in one stretch."""
RAM_SHARE = 0.5
"""Of the free memory of a CPU machine, how much the pages may take."""
BLOCK = 32
"""Tokens computed together where the same results are wanted in any batch."""
MOST_TOKENS = 512
"""Tokens of a pass on the CPU: with more, activations leave the cache between one operation and the next."""


def batch_of(planned: Pass, page_size: int, penalised: bool = False) -> StepBatch:
    """The tensors of a pass; `penalised` adds what a repetition penalty acts on."""
    input_ids: list[int] = []
    positions: list[int] = []
    sample_from: list[int] = []
    drawn: list[Sample] = []
    for row in planned.rows:
        start = row.sample.num_cached
        input_ids += row.sample.slice(start, start + row.count)
        positions += range(start, start + row.count)
        sample_from += [len(input_ids) - 1] * len(row.draws)
        drawn += row.draws
    query_lens = [row.count for row in planned.rows]
    most = max(len(row.sample.pages) for row in planned.rows)
    page_table = torch.tensor([row.sample.pages + [0] * (most - len(row.sample.pages)) for row in planned.rows], dtype=torch.int32)
    places = torch.tensor(positions)
    rows = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
    return StepBatch(
        input_ids=torch.tensor(input_ids),
        positions=places,
        slots=page_table[rows, places // page_size].long() * page_size + places % page_size,
        query_lens=query_lens,
        context_lens=torch.tensor([row.sample.num_cached for row in planned.rows], dtype=torch.int32),
        page_table=page_table,
        sample_from=torch.tensor(sample_from, dtype=torch.int64),
        keys=torch.tensor([sample.key for sample in drawn], dtype=torch.int64),
        response_positions=torch.tensor([len(sample.tokens) for sample in drawn], dtype=torch.int64),
        history=[torch.tensor(sample.slice(0, len(sample))) for sample in drawn] if penalised else None,
    )


class TorchBackend(Backend):
    """See Backend. Runs one pass after the other; each draws one token for a row that is complete.

    `shape` is what `probe.cache_shape` found in the module. With `invariant` every token is computed in the same shapes, whatever else is
    in the batch, so it is rounded alike in any batch. A matrix product adds up in an order that depends on its shape, and a sum over keys
    on how many there are. So a pass is cut into blocks of a fixed number of tokens, padded with tokens that nobody reads; a token attends
    by itself, as in decoding, even when it is part of a prompt; and tokens are drawn a row at a time. Then a prompt may be cut anywhere, a
    sequence may be preempted and computed again, and the bits are the same. Experts of a mixture see as many tokens as are routed to them,
    which depends on the others in the block: such models go token by token.
    """

    def __init__(self, module: PreTrainedModel, shape: CacheShape, gpu_memory_utilization: float, invariant: bool = False) -> None:
        self.module, self.shape, self.page_size = module, shape, shape.page_size
        self.most_tokens = MOST_TOKENS if module.device.type == "cpu" else None
        self._gpu_memory_utilization = gpu_memory_utilization
        self._cache: KVCache | None = None
        config = module.config.get_text_config()
        experts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        self._invariant, self._block = invariant, 1 if any(experts) else BLOCK

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, passes are computed with the weights that the module had at the start, laid out for it. For one generation."""
        with prepacked(self.module):
            yield

    def run(self, scheduler: Scheduler, sampling: SamplingParams, take_aborts: TakeAborts = set) -> Iterator[tuple[Sample, str]]:
        with self.ready():
            while not scheduler.is_idle:
                for sample in scheduler.abort(take_aborts()):
                    yield sample, "abort"
                planned = scheduler.plan()
                if not planned.rows:
                    continue
                self.copy_pages(planned.copies)
                batch = batch_of(planned, self.page_size, sampling.repetition_penalty != 1.0)
                tokens, log_probs = self.step(batch, sampling)
                for one in running[-1:]:
                    one.written += len(tokens)
                drawn = zip(tokens.tolist(), log_probs.tolist(), strict=True)
                for row, samples in [(row, row.draws) for row in planned.rows]:
                    if not samples:
                        scheduler.advance(row)
                    for sample in samples:
                        token, log_prob = next(drawn)
                        scheduler.append(sample, [token], [log_prob])
                        reason = sample.find_end(len(sample.tokens) - 1, len(sample.tokens), math.isfinite(log_prob))
                        if reason is not None:
                            scheduler.finish(sample)
                            yield sample, reason

    def most_pages(self) -> int:
        device = self.module.device
        if device.type == "cuda":
            free = int(torch.cuda.mem_get_info(device)[0] * self._gpu_memory_utilization)
        else:
            free = int(available_ram() * RAM_SHARE)
        return free // self.shape.page_bytes

    def open(self, num_pages: int) -> None:
        self.close()
        self._cache = KVCache(self.shape, num_pages, self.module.device)
        self._attention = PagedAttention(self._cache)
        self.num_pages = num_pages

    def close(self) -> None:
        if self._cache is not None:
            del self._attention
        self._cache, self.num_pages = None, 0

    def copy_pages(self, copies: dict[int, int]) -> None:
        """Copy pages, all at once: target -> source."""
        assert self._cache is not None, "the backend is closed"
        self._cache.copy_pages(copies)

    def step(self, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        """Compute a pass and draw: tokens [S] int64 and log-probs [S] float32, not finite where the logits are not."""
        if not len(batch.sample_from):
            self.forward(batch, batch.sample_from)
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        # Samples of one prompt draw from the same logits: compute those once.
        distinct, inverse = batch.sample_from.unique(return_inverse=True)
        logits = self.forward(batch, distinct)
        if len(distinct) < len(inverse):
            logits = logits[inverse.to(logits.device)]
        tokens, log_probs = self._draw(logits, batch, sampling)
        return tokens.cpu(), log_probs.cpu()

    def forward(self, batch: StepBatch, logits_at: Tensor) -> Tensor:
        """Compute a pass; the logits [S, vocabulary] of its tokens `logits_at` [S]."""
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
            alone = StepBatch(ids, positions, slots, [1] * self._block, positions.int(), table, none, none, none)
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

    def _draw(self, logits: Tensor, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        size = 1 if self._invariant else len(logits)
        parts = [_sample(logits, batch, sampling, slice(row, row + size)) for row in range(0, len(logits), size)]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_probs for _, log_probs in parts])


def _sample(logits: Tensor, batch: StepBatch, sampling: SamplingParams, rows: slice) -> tuple[Tensor, Tensor]:
    return sample(
        logits[rows],
        uniforms(batch.keys[rows], batch.response_positions[rows]).to(logits.device),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        None if batch.history is None else batch.history[rows],
    )
