"""NativeRollout: continuous batching over pages, from the trainer's own weights."""

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

from lockstep.config.sampling import SamplingParams
from lockstep.generation.backend import Backend
from lockstep.generation.cpu.backend import TorchBackend
from lockstep.generation.cpu.fused import FusedBackend, fused_library
from lockstep.generation.cpu.kernels import Library
from lockstep.generation.cpu.passes import PAGE_SIZE, PassBackend
from lockstep.generation.open_scheduler import OpenScheduler
from lockstep.generation.open_stream import OpenStream
from lockstep.generation.pages import CacheShape, PagePool
from lockstep.generation.prefix_cache import PrefixCache
from lockstep.generation.probe import cache_shape, check_equivalence
from lockstep.generation.scheduler import Scheduler
from lockstep.generation.stream import NativeStream
from lockstep.models.attention import CACHED
from lockstep.workers.rollout.base import ModuleRollout
from lockstep.workers.rollout.request import Request
from lockstep.workers.rollout.stream import Stream

AnyScheduler = TypeVar("AnyScheduler", bound=Scheduler)


class NativeRollout(ModuleRollout):
    """See RolloutEngine. Prompts are prefilled packed; running sequences are decoded together; a seat is refilled as soon as it is free."""

    attention = CACHED
    notes_experts = False
    """Whether the backend notes what the routers of a mixture choose."""

    _stream: Stream | None = None
    """The one that is open: it has the pages."""

    def open(self, sampling: SamplingParams, *, num_tokens: int | None = None) -> Stream:
        """See RolloutEngine. Requests that start alike share pages, those that are over too. Without `num_tokens` the cache has room for
        `max_num_seqs` sequences that fill the context, or for as much as there is memory for."""
        self.check_weights()
        if num_tokens is None:
            num_tokens = (self.context or 1 << 40) * self.seats
        scheduler = self._scheduler(1 + -(-num_tokens // self.backend.page_size), OpenScheduler)
        room = scheduler.pool.capacity * scheduler.pool.page_size
        scheduler.longest = min(room, self.context or room)
        if not self.backend.in_one_shape:
            scheduler.cache = PrefixCache(scheduler.pool)
        return self._opened(OpenStream(self, sampling, self.backend, scheduler, self._forget_stream))

    def _open_for(self, requests: Sequence[Request], sampling: SamplingParams) -> Stream:
        """Over as many pages as the longest `max_num_seqs` requests can need together, or as there is memory for. Nothing is left to
        others, so that what is computed does not depend on when it is."""
        pages = self._pages_for(requests, sampling)
        if any(r.top_log_probs or r.prompt_log_probs for r in requests):
            own = self._scheduler(pages, OpenScheduler)
            return self._opened(OpenStream(self, sampling, self.backend, own, self._forget_stream))
        return self._opened(NativeStream(self, sampling, self.backend, self._scheduler(pages, Scheduler), self._forget_stream))

    def _pages_for(self, requests: Sequence[Request], sampling: SamplingParams) -> int:
        limits = [(len(r.prompt_ids), r.max_tokens or (r.sampling or sampling).max_tokens) for r in requests]
        needs = sorted((min(sum(limit), self.context or 1 << 40) for limit in limits), reverse=True)
        return 1 + sum(-(-need // self.backend.page_size) + 1 for need in needs[: self.seats])

    def _opened(self, stream: Stream) -> Stream:
        self._stream = stream
        return stream

    def _forget_stream(self) -> None:
        self._stream = None

    def abort(self, index: int) -> None:
        """End a request of the stream that is open, before the next pass; its completion has what was generated until then."""
        if self._stream is not None:
            self._stream.abort(index)

    def check(self) -> None:
        check_equivalence(self.module, self._cpu_backend(invariant=False))

    def sleep(self) -> None:
        """See RolloutEngine. Raises RuntimeError while a stream is open, which has the memory."""
        self._check_free()
        if "backend" in vars(self):
            self.backend.close()

    def _check_free(self) -> None:
        if self._stream is not None:
            raise RuntimeError("this engine has an open stream, whose pages these are: read it to its end, or close it")

    def _scheduler(self, wanted: int, kind: type[AnyScheduler]) -> AnyScheduler:
        """Over that many pages, or as many as there is memory for."""
        self._check_free()
        backend = self.backend
        if backend.num_pages < wanted:
            backend.close()  # its pages count as free memory
            backend.open(max(2, min(wanted, backend.most_pages())))
        pool = PagePool(backend.num_pages, backend.page_size)
        budget = min(self.pass_tokens, backend.most_tokens or self.pass_tokens)
        return kind(pool, self.seats, budget, backend.lookahead, backend.mixed)

    @cached_property
    def backend(self) -> Backend:
        """What generates on the module's device; made when it is first needed."""
        invariant = self.config.batch_invariant
        if self.module.device.type == "cuda":
            from lockstep.generation.gpu import backend, routed  # need Triton

            kind = routed.RoutedGPUBackend if self.notes_experts else backend.GPUBackend
            shape = cache_shape(self.module, kind.page_size, self.config.kv_cache_dtype)
            utilization = self.cache_share
            own = self.own_weights
            return kind(self.module, shape, utilization, own_weights=own, batch_invariant=invariant)
        return self._cpu_backend(invariant)

    def _cpu_backend(self, invariant: bool) -> PassBackend:
        (shape, library), utilization = self._cpu_parts, self.cache_share
        if library is not None:
            return FusedBackend(self.module, shape, library, utilization, invariant)
        return TorchBackend(self.module, shape, utilization, invariant)

    @cached_property
    def _cpu_parts(self) -> tuple[CacheShape, Library | None]:
        """What the module is, found once."""
        return cache_shape(self.module, PAGE_SIZE), fused_library(self.module)
