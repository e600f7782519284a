"""MixtureEngine: an FSDPEngine whose model is a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.models.load import Head
from lockstep.models.packing import Budget, PackedRows
from lockstep.models.routers import routers
from lockstep.observability.metrics import Metric
from lockstep.protocol import DataProto
from lockstep.workers.engine.fsdp.engine import FSDPEngine
from lockstep.workers.engine.replay import ROW, SampledExperts
from lockstep.workers.engine.routing import Routing
from lockstep.workers.engine.spec import EngineSpec


class MixtureEngine(FSDPEngine):
    """See FSDPEngine. Updates also say what the routers chose, and their gradient has the load-balance loss of
    model.router_aux_loss_coef in it. Where ranks divide the tokens of a micro-batch, neither is there.

    The routers of a language model that learns choose what the column `experts` says, where rows have it; a reference, with adapters off
    too, and a critic choose for themselves.
    """

    _routing: Routing | None = None
    _replays: bool = False
    _prefix = ""

    def __init__(self, module: PreTrainedModel, spec: EngineSpec, **options: Any) -> None:
        super().__init__(module, spec, **options)
        if spec.optim is not None and self.token_ranks == 1:
            self._num_routers, self._replays = len(routers(module)), spec.head is Head.LANGUAGE_MODEL
            self._prefix = "critic/" if spec.head is Head.VALUE else ""  # an actor of the same step says moe/* too
            self._routing = Routing(routers(module), spec.model.router_aux_loss_coef, self.gradient_ranks)

    def forward_backward(self, data: DataProto, *args: Any, **options: Any) -> dict[str, Metric]:
        if self._routing is None:
            return super().forward_backward(data, *args, **options)
        self._routing.begin(int((data.ragged("responses").lengths > 0).sum()), self.device)
        metrics, chosen = super().forward_backward(data, *args, **options), self._routing.end()
        return metrics | {f"{self._prefix}{name}": metric for name, metric in chosen.items()} if self.reports else metrics

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        replays, self._replays = self._replays, False
        try:
            with super().adapter_off():
                yield
        finally:
            self._replays = replays

    def _packs(self, data: DataProto, budget: Budget) -> Sequence[PackedRows]:
        if self._routing is None:
            return super()._packs(data, budget)
        if not self._replays or "experts" not in data:
            return self._routing.noted(super()._packs(data, budget), None)
        data = data.select_idxs((data.ragged("responses").lengths > 0).nonzero().flatten())
        data.set(ROW, torch.arange(len(data)))
        return self._routing.noted(super()._packs(data, budget), SampledExperts(data, self._num_routers))
