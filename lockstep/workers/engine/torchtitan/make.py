"""A TorchtitanEngine from the configuration. torchtitan is imported here, when it has been chosen."""

from __future__ import annotations

from lockstep.config.engine import EngineChoice
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.order import EngineOrder
from lockstep.workers.engine.precision import compute_dtype
from lockstep.workers.engine.torchtitan.compat import prepare_import


def make_torchtitan_engine(choice: EngineChoice, order: EngineOrder) -> TrainEngine:
    """See registry.make_engine."""
    prepare_import(order.device)
    from lockstep.workers.engine.torchtitan.engine import TorchtitanEngine

    config = choice.torchtitan
    module, source = order.load()
    engine = TorchtitanEngine(
        module,
        source,
        order.head,
        config=config,
        recompute=order.recompute(module, compute_dtype(config.dtype, order.device)),
        optim=order.optim,
        total_updates=order.total_updates,
        device=order.device,
    )
    engine.decoder = order.decoder(module)
    return engine
