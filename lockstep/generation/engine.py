"""NativeRollout: continuous batching over pages, from the trainer's own weights."""

from collections.abc import Sequence
from functools import cached_property

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.generation.backend import Backend
from lockstep.generation.cpu.fused_backend import FusedBackend, fused_library
from lockstep.generation.cpu.kernels import Library
from lockstep.generation.cpu.passes import PAGE_SIZE, PassBackend
from lockstep.generation.cpu.torch_backend import TorchBackend
from lockstep.generation.model_support import cache_shape, check_equivalence
from lockstep.generation.pages import CacheShape, PagePool
from lockstep.generation.prefix_cache import PrefixCache
from lockstep.generation.scheduler import Scheduler
from lockstep.generation.stream import NativeStream
from lockstep.models.attention import CACHED
from lockstep.workers.rollout.base import ModuleRollout
from lockstep.workers.rollout.request import Request
from lockstep.workers.rollout.stream import Stream

_WARM_PROMPT = 16
"""Tokens of a prompt that `warm_generation` computes."""


class NativeRollout(ModuleRollout):
    """See RolloutEngine. Prompts are prefilled packed; running sequences are decoded together;
    a waiting one starts as soon as another ends."""

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
        scheduler = self._scheduler(1 + -(-num_tokens // self.backend.page_size))
        room = scheduler.pool.capacity * scheduler.pool.page_size
        scheduler.longest = min(room, self.context or room)
        if not self.backend.in_one_shape:
            scheduler.cache = PrefixCache(scheduler.pool)
        return self._opened(NativeStream(self, sampling, self.backend, scheduler, self._forget_stream))

    def _open_for(self, requests: Sequence[Request], sampling: SamplingParams) -> Stream:
        scheduler = self._scheduler_for(requests, sampling)
        return self._opened(NativeStream(self, sampling, self.backend, scheduler, self._forget_stream))

    def _scheduler_for(self, requests: Sequence[Request], sampling: SamplingParams) -> Scheduler:
        """A scheduler over as many pages as the longest `max_num_seqs` requests can need together, or as there is memory for.

        It has no prefix cache, so that what is computed does not depend on when it is.
        """
        needs = []
        for request in requests:
            max_tokens = request.max_tokens or (request.sampling or sampling).max_tokens
            needs.append(min(len(request.prompt_ids) + max_tokens, self.context or 1 << 40))
        longest = sorted(needs, reverse=True)[: self.seats]
        return self._scheduler(1 + sum(-(-need // self.backend.page_size) + 1 for need in longest))

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

    def _scheduler(self, wanted: int) -> Scheduler:
        """A scheduler over that many pages, or as many as there is memory for."""
        self._check_free()
        backend = self.backend
        if backend.num_pages < wanted:
            backend.close()  # its pages count as free memory
            backend.open(max(2, min(wanted, backend.most_pages())))
        pool = PagePool(backend.num_pages, backend.page_size)
        budget = min(self.pass_tokens, backend.most_tokens or self.pass_tokens)
        return Scheduler(pool, self.seats, budget, backend.lookahead, backend.mixed)

    @cached_property
    def backend(self) -> Backend:
        """What generates on the module's device; made when it is first needed."""
        invariant = self.config.batch_invariant
        if self.module.device.type == "cuda":
            from lockstep.generation.gpu import backend  # needs Triton

            kind = backend.RoutedGPUBackend if self.notes_experts else backend.GPUBackend
            shape = cache_shape(self.module, kind.page_size, self.config.kv_cache_dtype)
            utilization = self.cache_share
            own = self.own_weights
            return kind(self.module, shape, utilization, own_weights=own, batch_invariant=invariant)
        return self._cpu_backend(invariant)

    def _cpu_backend(self, invariant: bool) -> PassBackend:
        shape, library = self._cpu_parts
        utilization = self.cache_share
        if library is not None:
            return FusedBackend(self.module, shape, library, utilization, invariant)
        return TorchBackend(self.module, shape, utilization, invariant)

    @cached_property
    def _cpu_parts(self) -> tuple[CacheShape, Library | None]:
        """What the module is, found once."""
        return cache_shape(self.module, PAGE_SIZE), fused_library(self.module)


def warm_generation(engine: NativeRollout, sampling: SamplingParams, n: int) -> None:
    """Compile what a first generation on a GPU computes: prompts, drawing, and decode steps of every size up to `max_num_seqs` rows, for
    `n` samples per prompt with these parameters. The engine must have its weights. It sleeps afterwards."""
    from lockstep.generation.gpu.backend import GPUBackend  # needs Triton

    prompt = torch.ones(min(_WARM_PROMPT, (engine.context or _WARM_PROMPT + 2) - 2), dtype=torch.int64)
    for _ in engine.generate_stream([Request(prompt, (0, 0, sample)) for sample in range(2)], sampling):
        pass
    assert isinstance(engine.backend, GPUBackend)
    engine.backend.warm_up(engine.seats, sampling, shares=n > 1)
    engine.sleep()
