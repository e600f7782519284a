"""An update that is left out where its loss or its gradient is not finite (trainer.on_nonfinite=skip)."""

import math
from typing import Any

from lockstep.errors import NumericalError
from lockstep.observability.metrics import Mean, Metric
from lockstep.workers.engine.base import OptimResult, TrainEngine
from lockstep.workers.engine.sharded import local_part


def update_or_skip(engine: TrainEngine, work: tuple[Any, ...], name: str) -> tuple[dict[str, Metric], OptimResult | None]:
    """`forward_backward(*work)` and `optim_step`; no result where a loss on any rank, or the gradient, is not finite: then no rank has
    changed a weight, and the gradients are cleared. The metric NAME/skipped_updates says which it was."""
    metrics: dict[str, Metric] = {}
    try:
        metrics = engine.forward_backward(*work)
    except NumericalError:
        _spoil_gradient(engine)
    try:
        return metrics | {f"{name}/skipped_updates": Mean(0.0)}, engine.optim_step()
    except NumericalError:
        return {f"{name}/skipped_updates": Mean(1.0)}, None


def _spoil_gradient(engine: TrainEngine) -> None:
    """Make this rank's gradient NaN: its norm, which all ranks compute together, tells the others."""
    for parameter in engine.module.parameters():
        gradient = getattr(parameter, "main_grad", parameter.grad)  # the first is megatron-core's
        if gradient is not None and local_part(gradient).numel():
            local_part(gradient).fill_(math.nan)
            return
