"""RoutedGPUBackend: a mixture of experts on a GPU, and which experts every token went to (router_replay).

The captured steps write what routers choose beside the token's key and value (`KVCache.experts`). A sample's part is copied when it gives
its pages up, behind the steps that wrote it and before any that write those pages anew; nobody waits for the copy until it is asked for.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.generation.gpu.backend import GPUBackend
from lockstep.generation.gpu.prefill import upload
from lockstep.generation.scheduler import Sample
from lockstep.models.routers import NOT_RECORDED, routers


class RoutedGPUBackend(GPUBackend):
    """See GPUBackend. Raises ConfigError for a model whose layers are not computed here but by transformers."""

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
        """See routed.RoutedBackend."""
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
