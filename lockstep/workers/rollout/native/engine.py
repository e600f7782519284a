"""NativeRollout: continuous batching over pages, from the trainer's own weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.models.cached_attention import CACHED
from lockstep.workers.rollout.base import Completion, DecodeText, ModuleRollout, Request, failed
from lockstep.workers.rollout.native.cpu.fused import FusedRunner, fused_library
from lockstep.workers.rollout.native.generation import Generation
from lockstep.workers.rollout.native.invariant import InvariantRunner
from lockstep.workers.rollout.native.pages import PagePool
from lockstep.workers.rollout.native.probe import cache_shape, check_equivalence
from lockstep.workers.rollout.native.runner import Runner
from lockstep.workers.rollout.native.scheduler import Scheduler
from lockstep.workers.rollout.native.torch_runner import PAGE_SIZE, TorchRunner
from lockstep.workers.rollout.stopping import Stopping

if TYPE_CHECKING:  # needs Triton, which is on machines with a GPU only
    from lockstep.workers.rollout.native.gpu.backend import GPUBackend
    from lockstep.workers.rollout.native.gpu.generation import GPUGeneration


class NativeRollout(ModuleRollout):
    """See RolloutEngine. Prompts are prefilled packed; running sequences are decoded together; a seat is refilled as soon as it is free."""

    attention = CACHED

    def __init__(
        self, module: PreTrainedModel, config: RolloutConfig, pad_token_id: int, decode_text: DecodeText | None = None
    ) -> None:
        super().__init__(module, config, pad_token_id, decode_text)
        self._runner: Runner | GPUBackend | None = None
        self._aborts: set[int] = set()

    @torch.no_grad()
    def generate_stream(self, requests: Sequence[Request], sampling: SamplingParams) -> Iterator[Completion]:
        self._aborts.clear()
        faults = self._faults(requests, sampling)
        context = getattr(self.module.config.get_text_config(), "max_position_embeddings", None)
        stopping = {
            index: Stopping.of(request, sampling, context, self.decode_text)
            for index, request in enumerate(requests)
            if index not in faults
        }
        if stopping:
            scheduler = self._scheduler(requests, stopping)
            for index in list(stopping):
                length, limit = len(requests[index].prompt_ids), stopping[index].max_tokens
                if not scheduler.can_hold(length, limit):
                    del stopping[index]
                    room = scheduler.pool.capacity * scheduler.pool.page_size
                    reason = (
                        f"prompt and response may have {length} + {limit} tokens, the key-value cache has room for {room}; "
                        "free memory, raise actor_rollout_ref.rollout.gpu_memory_utilization, or lower the longest response"
                    )
                    faults[index] = failed(index, requests[index], reason, self.version)
        yield from faults.values()
        if stopping:
            generation = self._generation(scheduler, requests, stopping, sampling)
            with self._runner.ready() if isinstance(self._runner, Runner) else nullcontext():
                yield from generation.run(self._take_aborts)

    def abort(self, index: int) -> None:
        """End a request of the running `generate_stream` before the next pass; its completion has what was generated until then."""
        self._aborts.add(index)

    def check(self) -> None:
        shape, library = cache_shape(self.module, PAGE_SIZE), fused_library(self.module)
        check_equivalence(self.module, FusedRunner(self.module, shape, library) if library else TorchRunner(self.module, shape))

    def sleep(self) -> None:
        if self._runner is not None:
            self._runner.close()

    def _take_aborts(self) -> set[int]:
        aborts, self._aborts = self._aborts, set()
        return aborts

    def _scheduler(self, requests: Sequence[Request], stopping: dict[int, Stopping]) -> Scheduler:
        """Over as many pages as the longest `max_num_seqs` requests can need together, or as there is memory for."""
        if self._runner is None:
            self._runner = self._make_runner()
        runner, seats = self._runner, self.config.max_num_seqs
        needs = sorted((len(requests[i].prompt_ids) + limits.max_tokens for i, limits in stopping.items()), reverse=True)
        wanted = 1 + sum(-(-need // runner.page_size) + 1 for need in needs[:seats])
        if runner.num_pages < wanted:
            runner.close()  # its pages count as free memory
            runner.open(max(2, min(wanted, runner.most_pages())))
        pool = PagePool(runner.num_pages, runner.page_size)
        budget = min(self.config.max_num_batched_tokens, runner.most_tokens or self.config.max_num_batched_tokens)
        return Scheduler(pool, seats, budget, runner.lookahead, runner.mixed)

    def _make_runner(self) -> Runner | GPUBackend:
        utilization, invariant = self.config.gpu_memory_utilization, self.config.batch_invariant
        if self.module.device.type == "cuda":
            from lockstep.workers.rollout.native.gpu.backend import GPUBackend

            shape = cache_shape(self.module, GPUBackend.page_size)
            return GPUBackend(self.module, shape, utilization, own_weights=self.own_weights, batch_invariant=invariant)
        shape, library = cache_shape(self.module, PAGE_SIZE), fused_library(self.module)
        if library is not None:
            return FusedRunner(self.module, shape, library, utilization, invariant)
        kind = InvariantRunner if invariant else TorchRunner
        return kind(self.module, shape, utilization)

    def _generation(
        self, scheduler: Scheduler, requests: Sequence[Request], stopping: dict[int, Stopping], sampling: SamplingParams
    ) -> Generation | GPUGeneration:
        assert self._runner is not None
        if isinstance(self._runner, Runner):
            return Generation(self._runner, scheduler, requests, stopping, sampling, self.version)
        from lockstep.workers.rollout.native.gpu.generation import GPUGeneration

        return GPUGeneration(self._runner, scheduler, requests, stopping, sampling, self.version)
