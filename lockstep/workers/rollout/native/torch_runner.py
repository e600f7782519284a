"""TorchRunner: passes through the Hugging Face module, attention over pages in plain PyTorch. It runs on every device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.utils.memory import available_ram
from lockstep.workers.rollout.counted import uniforms
from lockstep.workers.rollout.native.layout import CacheShape, KVCache, StepBatch
from lockstep.workers.rollout.native.linears import prepacked
from lockstep.workers.rollout.native.paged import PagedAttention
from lockstep.workers.rollout.native.runner import Runner
from lockstep.workers.rollout.sampling import sample

PAGE_SIZE = 16
"""Tokens a page on the CPU: little is lost in a last page that is not full, and a page is still copied in one stretch."""
RAM_SHARE = 0.5
"""Of the free memory of a CPU machine, how much the pages may take."""
MOST_TOKENS = 512
"""Tokens of a pass on the CPU: with more, activations leave the cache between one operation and the next."""


class TorchRunner(Runner):
    """See Runner. `shape` is what `probe.cache_shape` found in the module."""

    def __init__(self, module: PreTrainedModel, shape: CacheShape, gpu_memory_utilization: float = 0.5) -> None:
        self.module, self.shape, self.page_size = module, shape, shape.page_size
        self.most_tokens = MOST_TOKENS if module.device.type == "cpu" else None
        self._gpu_memory_utilization = gpu_memory_utilization
        self._cache: KVCache | None = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        with prepacked(self.module):
            yield

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
        self._attention = self._make_attention(self._cache)
        self.num_pages = num_pages

    def close(self) -> None:
        if self._cache is not None:
            del self._attention
        self._cache, self.num_pages = None, 0

    def copy_pages(self, copies: dict[int, int]) -> None:
        assert self._cache is not None, "the runner is asleep"
        self._cache.copy_pages(copies)

    def step(self, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        if not len(batch.sample_from):
            self.forward(batch, batch.sample_from)
            return torch.empty(1, 0, dtype=torch.int64), torch.empty(1, 0)
        # Samples of one prompt draw from the same logits: compute those once.
        distinct, inverse = batch.sample_from.unique(return_inverse=True)
        logits = self.forward(batch, distinct)
        if len(distinct) < len(inverse):
            logits = logits[inverse.to(logits.device)]
        tokens, log_probs = self._draw(logits, batch, sampling)
        return tokens[None].cpu(), log_probs[None].cpu()

    def forward(self, batch: StepBatch, logits_at: Tensor) -> Tensor:
        """Compute a pass; the logits [S, vocabulary] of its tokens `logits_at` [S]."""
        assert self._cache is not None, "the runner is asleep"
        self._attention.begin(batch)
        return self._call(batch.input_ids, batch.positions, logits_at)

    def _make_attention(self, cache: KVCache) -> PagedAttention:
        return PagedAttention(cache)

    def _call(self, input_ids: Tensor, positions: Tensor, logits_at: Tensor) -> Tensor:
        device = self.module.device
        # Without a token to draw, the head is still applied to one: no index means "all" to transformers.
        keep = logits_at if len(logits_at) else torch.zeros(1, dtype=torch.int64)
        out = self.module(
            input_ids=input_ids.to(device)[None],
            position_ids=positions.to(device)[None],
            use_cache=False,
            kv_cache=self._attention,
            logits_to_keep=keep.to(device),
        )
        return out.logits[0]

    def _draw(self, logits: Tensor, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        return _sample(logits, batch, sampling, slice(None))


def draw_one_by_one(logits: Tensor, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs [S] from logits [S, vocabulary], each by itself: the same bits whatever the others are."""
    drawn = [_sample(logits, batch, sampling, slice(row, row + 1)) for row in range(len(logits))]
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([log_probs for _, log_probs in drawn])


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
