"""GPUBackend: memory for pages, rows and graphs on a CUDA device, and a scheduler's samples run to their ends on them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.errors import ConfigError
from lockstep.generation.backend import Backend, Event, TakeAborts
from lockstep.generation.gpu.attention import num_splits
from lockstep.generation.gpu.draw import num_chunks
from lockstep.generation.gpu.filters import make_filter
from lockstep.generation.gpu.fused import FusedDecoder, fuse_projections
from lockstep.generation.gpu.hf_layers import HFDecoder
from lockstep.generation.gpu.loop import GenerationLoop
from lockstep.generation.gpu.prefill import upload
from lockstep.generation.gpu.rows import RowState
from lockstep.generation.gpu.runner import Decoder, DecodeRunner, WarmSteps, bucket, buckets
from lockstep.generation.model_support import is_fusable
from lockstep.generation.pages import CacheShape, Float8Cache, KVCache
from lockstep.generation.scheduler import Sample, Scheduler
from lockstep.models.routers import NOT_RECORDED, routers
from lockstep.utils.device import free_device_memory

PAGE_SIZE = 64
INTERVAL = 8
"""Decode steps between two looks of the host: long enough to hide its work, short enough that a stopped row does not idle for long."""
CACHES: dict[str, type[KVCache]] = {"auto": KVCache, "fp8": Float8Cache}
"""By `rollout.kv_cache_dtype`."""
_WIDTH_STEP = 16
"""The page table grows by this many pages a row, so that calls of similar lengths share their graphs."""


class _Workspace(NamedTuple):
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
        assert self._fused or not shape.is_small, "pages of fewer bits are for gpu/fused.py (model_support.check_small_cache)"
        self._device = module.device
        self._cache: KVCache | None = None
        self._workspace: _Workspace | None = None
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
        rows, decoder, runner = self._workspace_for(self._cache, scheduler.max_num_seqs, width, sampling.penalises)
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

    def warm_up(self, max_num_seqs: int, sampling: SamplingParams, *, shares: bool) -> None:
        assert self._cache is not None, "the backend is closed"
        _, _, runner = self._workspace_for(self._cache, max_num_seqs, _WIDTH_STEP, sampling.penalises)
        heads = self._shape.num_kv_heads
        sizes = [size for size in buckets(max_num_seqs) if size == bucket(max_num_seqs) or not self.in_one_shape]
        for size in sizes:
            with_shared = shares and not self.in_one_shape and num_splits(size, heads) == 1
            runner.warm_up([(size, make_filter(sampling), shared, False, False) for shared in (False, True)[: 1 + with_shared]])

    def _workspace_for(self, cache: KVCache, max_num_seqs: int, width: int, seen: bool) -> _Workspace:
        """Rows of at least `width` pages, and what hangs on them; kept from the last call where they are wide enough."""
        workspace = self._workspace
        capacity = bucket(max_num_seqs)
        if workspace is None or workspace.rows.capacity < capacity or workspace.rows.page_table.shape[1] < width:
            self._leave()
            width = -(-width // _WIDTH_STEP) * _WIDTH_STEP
            vocabulary = self._module.config.get_text_config().vocab_size
            rows = RowState.make(capacity, width, vocabulary, num_chunks(vocabulary), self._device)
            decoder: Decoder = (
                FusedDecoder(self._module, cache, width * self.page_size)
                if self._fused
                else HFDecoder(self._module, cache, compile_layers=self._device.type == "cuda")
            )
            workspace = self._workspace = _Workspace(rows, decoder, DecodeRunner(decoder, rows, self.page_size, self._warm))
        if seen != (workspace.rows.seen is not None):
            workspace.runner.forget_filtered()
            workspace.rows.track_seen(seen)
        return workspace

    def _find_addresses(self) -> list[int]:
        """Where the parameters are."""
        return [holder[name].data_ptr() for holder, name in self._parameters]

    def _leave(self) -> None:
        if self._workspace is not None:
            self._workspace.runner.forget()
            self._workspace.decoder.release()
        self._workspace = None


class RoutedGPUBackend(GPUBackend):
    """A GPUBackend for a mixture of experts, which records which experts every token went to (router_replay).

    The captured steps write what routers choose beside the token's key and value (`KVCache.experts`). A sample's part is copied when it
    gives its pages up, behind the steps that wrote it and before any that write those pages anew; `experts_of` says how to wait for it.
    Raises ConfigError for a model whose layers transformers computes.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self._fused:
            raise ConfigError(
                "actor_rollout_ref.rollout.router_replay=true on a GPU is for Mixtral and Qwen3-MoE in bfloat16 "
                f"(actor_rollout_ref.actor.fsdp_config.dtype), not for {type(self._module).__name__} in {self._shape.dtype}; "
                "set it to false"
            )
        found: Any = routers(self._module)
        self._width = len(found), found[0].top_k

    def most_pages(self) -> int:
        own = self._shape.page_size * 2 * self._width[0] * self._width[1]
        return super().most_pages() * self._shape.page_bytes // (self._shape.page_bytes + own)

    def open(self, num_pages: int) -> None:
        super().open(num_pages)
        assert self._cache is not None
        size = (num_pages, self.page_size, *self._width)
        self._cache.experts = torch.full(size, NOT_RECORDED, dtype=torch.int16, device=self._device)

    def experts_of(self, sample: Sample) -> Callable[[], Tensor]:
        """See routing.RoutedBackend."""
        assert self._cache is not None
        assert self._cache.experts is not None
        pages = upload(torch.tensor(sample.pages), self._device)
        known = min(sample.num_cached, len(sample))
        found = self._cache.experts[pages].flatten(0, 1)[:known].flatten(1)
        if not found.is_cuda:
            return lambda: found
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
        there = torch.cuda.Event()
        there.record()

        def wait() -> Tensor:
            there.synchronize()
            return host

        return wait
