"""A MegatronEngine from the configuration. megatron-core is imported here, when it has been chosen."""

from __future__ import annotations

from lockstep.config.engine import EngineChoice
from lockstep.workers.engine.megatron.engine import MegatronEngine
from lockstep.workers.engine.order import EngineOrder
from lockstep.workers.engine.precision import compute_dtype


def make_megatron_engine(choice: EngineChoice, order: EngineOrder) -> MegatronEngine:
    """See registry.make_engine."""
    config = choice.megatron
    module, source = order.load()
    engine = MegatronEngine(
        module,
        source,
        order.head,
        config=config,
        recompute=order.recompute(module, compute_dtype(config.dtype, order.device)),
        optim=order.optim,
        total_updates=order.total_updates,
        device=order.device,
        seed=order.seed,
    )
    engine.decoder = order.decoder(module)
    return engine
