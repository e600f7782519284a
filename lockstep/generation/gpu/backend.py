"""GPUBackend: memory for pages, rows and graphs on a CUDA device, and a scheduler's samples run to their ends on them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.generation.backend import Backend, Event, TakeAborts
from lockstep.generation.family import is_fusable
from lockstep.generation.float8_cache import Float8Cache
from lockstep.generation.gpu.attention import num_splits
from lockstep.generation.gpu.draw import num_chunks
from lockstep.generation.gpu.filters import make_filter
from lockstep.generation.gpu.fused import FusedDecoder, fuse_projections
from lockstep.generation.gpu.hf_layers import HFDecoder
from lockstep.generation.gpu.loop import GenerationLoop
from lockstep.generation.gpu.rows import RowState
from lockstep.generation.gpu.runner import Decoder, DecodeRunner, WarmSteps, bucket, buckets
from lockstep.generation.pages import CacheShape, KVCache
from lockstep.generation.scheduler import Scheduler
from lockstep.utils.device import free_device_memory

PAGE_SIZE = 64
INTERVAL = 8
"""Decode steps between two looks of the host: long enough to hide its work, short enough that a stopped row does not idle for long."""
CACHES: dict[str, type[KVCache]] = {"auto": KVCache, "fp8": Float8Cache}
"""By `rollout.kv_cache_dtype`."""
_WIDTH_STEP = 16
"""The page table grows by this many pages a row, so that calls of similar lengths share their graphs."""


class _Seated(NamedTuple):
    """What one width of rows needs."""

    rows: RowState
    decoder: Decoder
    runner: DecodeRunner


class GPUBackend(Backend):
    """See Backend. Decodes `module` on its device.

    `own_weights` says that the module's parameters are nobody else's, so that they may be laid out anew (see `fuse_projections`).
    `fused=False` keeps the common families on the way that all others go (tests compare the two).
    """

    page_size = PAGE_SIZE
    lookahead = INTERVAL
    mixed = False

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
        self._module = module
        self._shape = shape
        self._own_weights = own_weights
        self.in_one_shape = batch_invariant
        self._gpu_memory_utilization = gpu_memory_utilization
        # Grouped products on a GPU are of bfloat16.
        self._fused = fused and is_fusable(module.config, mixtures=shape.dtype == torch.bfloat16)
        assert self._fused or not shape.is_small, "pages of fewer bits are for gpu/fused.py (family.check_small_cache)"
        self._device = module.device
        self._cache: KVCache | None = None
        self._seated: _Seated | None = None
        # A list, made once: walking over the modules takes longer than a short request.
        self._parameters: list[tuple[Any, str]] = [
            (part._parameters, name) for part in module.modules() for name, own in part._parameters.items() if own is not None
        ]
        self._addresses: list[int] = []
        self._warm: WarmSteps = set()

    def most_pages(self) -> int:
        torch.cuda.empty_cache()  # what the allocator holds and nobody uses is free too
        free = free_device_memory(self._device)
        assert free is not None
        return int(free * self._gpu_memory_utilization) // self._shape.page_bytes

    def open(self, num_pages: int) -> None:
        self.close()
        self._cache = CACHES[self._shape.kept](self._shape, num_pages, self._device)
        self.num_pages = num_pages

    def close(self) -> None:
        self._leave()
        self._cache = None
        self.num_pages = 0
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def run(self, scheduler: Scheduler, sampling: SamplingParams, take_aborts: TakeAborts = set) -> Iterator[list[Event]]:
        assert self._cache is not None, "the backend is closed"
        longest = scheduler.longest or max(sample.most_cached + 1 for sample in scheduler.waiting)
        width = -(-longest // self.page_size) + 1
        has_moved = self._find_addresses() != self._addresses
        if has_moved and self._own_weights and self._fused:
            fuse_projections(self._module)
        rows, decoder, runner = self._seat(self._cache, scheduler.max_num_seqs, width, sampling.penalises)
        if has_moved:
            runner.forget()
            self._addresses = self._find_addresses()
        if self.in_one_shape:
            scheduler.in_one_shape = True
            # A prompt must not be cut where others leave off; each is a pass of its own anyway.
            scheduler.max_num_batched_tokens = 1 << 40
        rows.stop.zero_()
        # The device looks for the tokens that end a response unless it says otherwise; others are found when an interval is read.
        known = [token for token in sampling.stop_token_ids if 0 <= token < len(rows.stop)]
        if known:
            rows.stop[torch.tensor(known, device=self._device)] = 1
        loop = GenerationLoop(scheduler, decoder, runner, rows, self._cache, self.in_one_shape, sampling)
        yield from loop.run(take_aborts)

    def warm_up(self, seats: int, sampling: SamplingParams, *, shares: bool) -> None:
        assert self._cache is not None, "the backend is closed"
        _, _, runner = self._seat(self._cache, seats, _WIDTH_STEP, sampling.penalises)
        heads = self._shape.num_kv_heads
        sizes = [size for size in buckets(seats) if size == bucket(seats) or not self.in_one_shape]
        for size in sizes:
            with_shared = shares and not self.in_one_shape and num_splits(size, heads) == 1
            runner.warm_up([(size, make_filter(sampling), shared, False, False) for shared in (False, True)[: 1 + with_shared]])

    def _seat(self, cache: KVCache, max_num_seqs: int, width: int, seen: bool) -> _Seated:
        """Rows of at least `width` pages, and what hangs on them; kept from the last call where they are wide enough."""
        seated = self._seated
        capacity = bucket(max_num_seqs)
        if seated is None or seated.rows.capacity < capacity or seated.rows.page_table.shape[1] < width:
            self._leave()
            width = -(-width // _WIDTH_STEP) * _WIDTH_STEP
            vocabulary = self._module.config.get_text_config().vocab_size
            rows = RowState.make(capacity, width, vocabulary, num_chunks(vocabulary), self._device)
            decoder: Decoder = (
                FusedDecoder(self._module, cache, width * self.page_size)
                if self._fused
                else HFDecoder(self._module, cache, compile_layers=self._device.type == "cuda")
            )
            seated = self._seated = _Seated(rows, decoder, DecodeRunner(decoder, rows, self.page_size, self._warm))
        if seen != (seated.rows.seen is not None):
            seated.runner.forget_filtered()
            seated.rows.track_seen(seen)
        return seated

    def _find_addresses(self) -> list[int]:
        """Where the parameters are."""
        return [holder[name].data_ptr() for holder, name in self._parameters]

    def _leave(self) -> None:
        if self._seated is not None:
            self._seated.runner.forget()
            self._seated.decoder.release()
        self._seated = None
