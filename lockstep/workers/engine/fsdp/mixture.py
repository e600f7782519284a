"""MixtureEngine: an FSDPEngine whose model is a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from lockstep.models.packing import Budget, PackedRows
from lockstep.observability.metrics import Metric
from lockstep.protocol import DataProto
from lockstep.workers.engine.fsdp.engine import FSDPEngine
from lockstep.workers.engine.routing import Routing, check_balanced, routers
from lockstep.workers.engine.spec import EngineSpec


class MixtureEngine(FSDPEngine):
    """See FSDPEngine. Updates also say what the routers chose, and their gradient has the load-balance loss of
    model.router_aux_loss_coef in it. Where tokens or layers are divided among ranks, neither is there."""

    _routing: Routing | None = None

    def __init__(self, module: PreTrainedModel, spec: EngineSpec, **options: Any) -> None:
        super().__init__(module, spec, **options)
        coef, divided = spec.model.router_aux_loss_coef, self.model_group is not None
        check_balanced(coef, divided)
        if spec.optim is not None and not divided:
            self._routing = Routing(routers(module), coef, self.gradient_ranks)

    def forward_backward(self, data: DataProto, *args: Any, **options: Any) -> dict[str, Metric]:
        if self._routing is None:
            return super().forward_backward(data, *args, **options)
        self._routing.begin(int((data.ragged("responses").lengths > 0).sum()), self.device)
        return super().forward_backward(data, *args, **options) | self._routing.end()

    def _packs(self, data: DataProto, budget: Budget) -> Sequence[PackedRows]:
        packs = super()._packs(data, budget)
        return packs if self._routing is None else self._routing.noted(packs)
