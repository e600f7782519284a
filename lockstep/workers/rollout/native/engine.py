"""NativeRollout: continuous batching over pages, from the trainer's own weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from functools import cached_property

import torch

from lockstep.config.sampling import SamplingParams
from lockstep.models.cached_attention import CACHED
from lockstep.workers.rollout.base import Completion, Numbered, Request, Stopping, failed
from lockstep.workers.rollout.kinds import ModuleRollout
from lockstep.workers.rollout.native.backend import Backend
from lockstep.workers.rollout.native.cpu.backend import PAGE_SIZE, TorchBackend
from lockstep.workers.rollout.native.cpu.fused import FusedBackend, fused_library
from lockstep.workers.rollout.native.generation import Requests, generate
from lockstep.workers.rollout.native.pages import PagePool
from lockstep.workers.rollout.native.probe import cache_shape, check_equivalence
from lockstep.workers.rollout.native.scheduler import Scheduler


class NativeRollout(ModuleRollout):
    """See RolloutEngine. Prompts are prefilled packed; running sequences are decoded together; a seat is refilled as soon as it is free."""

    attention = CACHED

    _aborts: Set[int] = frozenset()
    _streams = False
    """Whether a `generate_stream` is open: it has the pages."""

    def generate_stream(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        """See RolloutEngine. Raises RuntimeError while another stream is open: read that to its end, or close it."""
        if self._streams:
            raise RuntimeError(
                "this engine has an open generate_stream, whose pages a second one would share: read it to its end, or close it"
            )
        self._streams, self._aborts = True, frozenset()
        try:
            yield from super().generate_stream(requests, sampling)
        finally:
            self._streams = False

    @torch.no_grad()
    def _serve(self, served: Sequence[Numbered], sampling: SamplingParams) -> Iterator[Completion]:
        requests = dict(served)
        limits = {index: Stopping.of(request, sampling, self.context, self.decode_text) for index, request in served}
        scheduler = self._scheduler(requests, limits)
        for index, request in served:
            length, longest = len(request.prompt_ids), limits[index].max_tokens
            if not scheduler.can_hold(length, longest):
                del limits[index]
                room = scheduler.pool.capacity * scheduler.pool.page_size
                reason = (
                    f"prompt and response may have {length} + {longest} tokens, the key-value cache has room for {room}; "
                    "free memory, raise actor_rollout_ref.rollout.gpu_memory_utilization, or lower the longest response"
                )
                yield failed(index, request, reason, self.version)
        if limits:
            yield from generate(self.backend, scheduler, requests, limits, sampling, self.version, self._take_aborts)

    def abort(self, index: int) -> None:
        """End a request of the running `generate_stream` before the next pass; its completion has what was generated until then."""
        self._aborts |= {index}

    def check(self) -> None:
        check_equivalence(self.module, self._cpu_backend(invariant=False))

    def sleep(self) -> None:
        if "backend" in vars(self):
            self.backend.close()

    def _take_aborts(self) -> Set[int]:
        aborts, self._aborts = self._aborts, frozenset()
        return aborts

    def _scheduler(self, requests: Requests, limits: dict[int, Stopping]) -> Scheduler:
        """Over as many pages as the longest `max_num_seqs` requests can need together, or as there is memory for."""
        backend, seats = self.backend, self.config.max_num_seqs
        needs = sorted((len(requests[i].prompt_ids) + own.max_tokens for i, own in limits.items()), reverse=True)
        wanted = 1 + sum(-(-need // backend.page_size) + 1 for need in needs[:seats])
        if backend.num_pages < wanted:
            backend.close()  # its pages count as free memory
            backend.open(max(2, min(wanted, backend.most_pages())))
        pool = PagePool(backend.num_pages, backend.page_size)
        budget = min(self.config.max_num_batched_tokens, backend.most_tokens or self.config.max_num_batched_tokens)
        return Scheduler(pool, seats, budget, backend.lookahead, backend.mixed)

    @cached_property
    def backend(self) -> Backend:
        """What generates on the module's device; made when it is first needed."""
        invariant = self.config.batch_invariant
        if self.module.device.type == "cuda":
            from lockstep.workers.rollout.native.gpu.backend import GPUBackend  # needs Triton

            shape = cache_shape(self.module, GPUBackend.page_size)
            utilization, own = self.config.gpu_memory_utilization, self.own_weights
            return GPUBackend(self.module, shape, utilization, own_weights=own, batch_invariant=invariant)
        return self._cpu_backend(invariant)

    def _cpu_backend(self, invariant: bool) -> TorchBackend:
        shape, library = cache_shape(self.module, PAGE_SIZE), fused_library(self.module)
        utilization = self.config.gpu_memory_utilization
        if library is not None:
            return FusedBackend(self.module, shape, library, utilization, invariant)
        return TorchBackend(self.module, shape, utilization, invariant)
