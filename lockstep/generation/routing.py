"""RoutedRollout: the native engine over a mixture of experts, whose completions say which experts every token went to (router_replay).

What a router chose for a token is stored where the token's key and value are: in a table over the slots of the cache, whose pages are
shared and copied with theirs. So samples of one prompt, prompts in pieces and preempted samples need nothing of their own. A sample's part
of the table is read before it gives its pages up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.config.sampling import SamplingParams
from lockstep.generation.cpu.paged_attention import StepBatch
from lockstep.generation.cpu.passes import PassBackend
from lockstep.generation.cpu.torch_backend import TorchBackend
from lockstep.generation.engine import NativeRollout
from lockstep.generation.pages import CacheShape
from lockstep.generation.scheduler import Sample, Scheduler
from lockstep.models.routers import NOT_RECORDED, RouterOutput, check_replay, routers
from lockstep.workers.rollout.request import Request


class RoutedBackend(TorchBackend):
    """See TorchBackend. Beside keys and values it stores the experts of each token."""

    def __init__(self, module: PreTrainedModel, shape: CacheShape, gpu_memory_utilization: float, invariant: bool = False) -> None:
        super().__init__(module, shape, gpu_memory_utilization, invariant)
        self._routers = routers(module)
        self._table: Tensor | None = None
        """[pages, page_size, routers, k] int16"""
        self._slots = torch.empty(0, dtype=torch.int64)

    @contextmanager
    def ready(self) -> Iterator[None]:
        with super().ready(), ExitStack() as hooks:
            for number, router in enumerate(self._routers):
                hooks.enter_context(router.register_forward_hook(self._hook(number)))
            yield

    def close(self) -> None:
        super().close()
        self._table = None

    def copy_pages(self, copies: dict[int, int]) -> None:
        super().copy_pages(copies)
        if copies and self._table is not None:
            self._table[list(copies)] = self._table[list(copies.values())]

    def experts_of(self, sample: Sample) -> Callable[[], Tensor]:
        """What gives [tokens of the sample that are computed, routers * k] int16."""
        assert self._table is not None, "a sample with pages has been computed"
        known = min(sample.num_cached, len(sample))
        found = self._table[sample.pages].flatten(0, 1)[:known].flatten(1)
        return lambda: found

    def _logits(self, batch: StepBatch, keep: Tensor) -> Tensor:
        self._slots = batch.slots
        return super()._logits(batch, keep)

    def _hook(self, layer: int) -> Callable[[nn.Module, Any, RouterOutput], None]:
        def store(router: nn.Module, args: Any, output: RouterOutput) -> None:
            chosen = output[2].to("cpu", torch.int16)
            if self._table is None:
                size = (self.num_pages, self.page_size, len(self._routers), chosen.shape[1])
                self._table = torch.full(size, NOT_RECORDED, dtype=torch.int16)
            self._table.flatten(0, 1)[self._slots, layer] = chosen

        return store


def _for_all(experts: Tensor, count: int) -> Tensor:
    """The experts of `count` tokens: NOT_RECORDED for the last, which was never computed."""
    found = torch.full((count, experts.shape[1]), NOT_RECORDED, dtype=torch.int16)
    known = min(count - 1, len(experts))
    found[:known] = experts[:known]
    return found


class RoutedRollout(NativeRollout):
    """See NativeRollout. `open` has no experts in its completions: only whole calls have.

    Raises ConfigError for a model or a device where this cannot be.
    """

    notes_experts = True

    def __init__(self, module: PreTrainedModel, *args: Any) -> None:
        check_replay(module.config, module.device.type)
        super().__init__(module, *args)

    def _scheduler_for(self, requests: Sequence[Request], sampling: SamplingParams) -> Scheduler:
        scheduler = super()._scheduler_for(requests, sampling)
        if not any(request.top_log_probs or request.prompt_log_probs for request in requests):
            scheduler.read_experts = self._read_experts
        return scheduler

    def _read_experts(self, sample: Sample) -> Callable[[int], Tensor]:
        """Return what gives the experts of so many tokens of the sample."""
        read = self.backend.experts_of(sample)  # type: ignore[attr-defined]  # of a device that check_replay lets pass
        return lambda count: _for_all(read(), count)

    def _cpu_backend(self, invariant: bool) -> PassBackend:
        return RoutedBackend(self.module, self._cpu_parts[0], self.cache_share, invariant)
