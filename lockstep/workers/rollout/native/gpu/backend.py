"""GPUBackend: memory for pages, rows and graphs on a CUDA device, and a scheduler's samples run to their ends on them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.utils.memory import free_device_memory
from lockstep.workers.rollout.native.backend import Backend, TakeAborts
from lockstep.workers.rollout.native.gpu.draw import num_chunks
from lockstep.workers.rollout.native.gpu.filters import make_filter
from lockstep.workers.rollout.native.gpu.fused import FusedDecoder, fuse_projections
from lockstep.workers.rollout.native.gpu.hf_layers import HFDecoder
from lockstep.workers.rollout.native.gpu.loop import GenerationLoop
from lockstep.workers.rollout.native.gpu.rows import RowState
from lockstep.workers.rollout.native.gpu.runner import Decoder, DecodeRunner, WarmSteps, bucket
from lockstep.workers.rollout.native.pages import CacheShape, KVCache
from lockstep.workers.rollout.native.probe import is_fusable
from lockstep.workers.rollout.native.scheduler import Sample, Scheduler

PAGE_SIZE = 64
INTERVAL = 8
"""Decode steps between two looks of the host: long enough to hide its work, short enough that a stopped row does not idle for long."""
_WIDTH_STEP = 16
"""The page table grows by this many pages a row, so that calls of similar lengths share their graphs."""


class GPUBackend(Backend):
    """See Backend. Decodes `module` on its device.

    `own_weights` says that the module's parameters are nobody else's, so that they may be laid out anew (see `fuse_projections`).
    `fused=False` keeps the common families on the way that all others go (tests compare the two).
    """

    page_size, lookahead, mixed = PAGE_SIZE, INTERVAL, False

    def __init__(
        self,
        module: PreTrainedModel,
        shape: CacheShape,
        gpu_memory_utilization: float,
        *,
        own_weights: bool,
        batch_invariant: bool,
        fused: bool = True,
    ) -> None:
        assert shape.page_size == self.page_size
        self._module, self._shape, self._own_weights, self._batch_invariant = module, shape, own_weights, batch_invariant
        self._gpu_memory_utilization, self._fused = gpu_memory_utilization, fused and is_fusable(module)
        self._device = module.device
        self._cache: KVCache | None = None
        self._rows: RowState | None = None
        self._decoder: Decoder | None = None
        self._runner: DecodeRunner | None = None
        self._addresses: list[int] = []
        self._warm: WarmSteps = set()

    def most_pages(self) -> int:
        torch.cuda.empty_cache()  # what the allocator holds and nobody uses is free too
        free = free_device_memory(self._device)
        assert free is not None
        return int(free * self._gpu_memory_utilization) // self._shape.page_bytes

    def open(self, num_pages: int) -> None:
        self.close()
        self._cache, self.num_pages = KVCache(self._shape, num_pages, self._device), num_pages

    def close(self) -> None:
        self._drop_rows()
        self._cache, self.num_pages = None, 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, scheduler: Scheduler, sampling: SamplingParams, take_aborts: TakeAborts = set) -> Iterator[tuple[Sample, str]]:
        lengths = [sample.most_cached + 1 for sample in scheduler.waiting]
        rows = self._prepare_rows(
            scheduler.max_num_seqs, -(-max(lengths) // self.page_size) + 1, sampling.repetition_penalty != 1.0
        )
        assert self._cache is not None
        assert self._decoder is not None
        assert self._runner is not None
        addresses = [parameter.data_ptr() for parameter in self._module.parameters()]
        if addresses != self._addresses:
            self._runner.forget()
            self._addresses = addresses
        if self._batch_invariant:
            scheduler.in_one_shape = True
            # A prompt must not be cut where others leave off; each is a pass of its own anyway.
            scheduler.max_num_batched_tokens = sum(lengths)
        rows.inverse_temperature.fill_(1.0 / (sampling.temperature or 1.0))
        rows.greedy.fill_(int(sampling.temperature == 0))
        rows.stop.zero_()
        # The device looks for the tokens that end every response; the others are found when an interval is read.
        common = frozenset.intersection(*(sample.limits.token_ids for sample in scheduler.waiting))
        known = [token for token in common if 0 <= token < len(rows.stop)]
        if known:
            rows.stop[torch.tensor(known, device=self._device)] = 1
        loop = GenerationLoop(scheduler, self._decoder, self._runner, rows, self._cache, self._batch_invariant)
        yield from loop.run(make_filter(sampling), take_aborts)

    def _prepare_rows(self, max_num_seqs: int, width: int, seen: bool) -> RowState:
        """Rows of at least `width` pages, and what hangs on them; kept from the last call where they are wide enough."""
        assert self._cache is not None, "the backend is closed"
        if self._own_weights and self._fused:
            fuse_projections(self._module)
        rows = self._rows
        if rows is None or rows.capacity < bucket(max_num_seqs) or rows.page_table.shape[1] < width:
            self._drop_rows()
            width = -(-width // _WIDTH_STEP) * _WIDTH_STEP
            vocabulary = self._module.config.get_text_config().vocab_size
            rows = RowState.make(bucket(max_num_seqs), width, vocabulary, num_chunks(vocabulary), self._device)
            if self._fused:
                self._decoder = FusedDecoder(self._module, self._cache, width * self.page_size)
            else:
                self._decoder = HFDecoder(self._module, self._cache, compile_layers=self._device.type == "cuda")
            self._rows, self._runner = rows, DecodeRunner(self._decoder, rows, self.page_size, self._warm)
        if seen != (rows.seen is not None):
            assert self._runner is not None
            self._runner.forget()
            rows.track_seen(seen)
        return rows

    def _drop_rows(self) -> None:
        if self._runner is not None:
            self._runner.forget()
        if self._decoder is not None:
            self._decoder.release()
        self._rows = self._decoder = self._runner = None
