"""A VeOmniEngine from the configuration."""

from __future__ import annotations

from transformers import PreTrainedModel

from lockstep.config.engine import EngineChoice
from lockstep.models.load import check_packing
from lockstep.workers.engine.fsdp import sharding
from lockstep.workers.engine.order import EngineOrder
from lockstep.workers.engine.precision import compute_dtype
from lockstep.workers.engine.veomni.engine import VeOmniEngine


def make_veomni_engine(choice: EngineChoice, order: EngineOrder) -> VeOmniEngine:
    """See registry.make_engine."""
    config = choice.veomni
    plain, source = order.load()
    engine = VeOmniEngine(
        plain,
        source,
        order.head,
        config=config,
        recompute=order.recompute(plain, compute_dtype(config.dtype, order.device)),
        optim=order.optim,
        total_updates=order.total_updates,
        device=order.device,
    )
    assert isinstance(engine.module, PreTrainedModel)
    check_packing(engine.module, engine.module, str(order.model.path), order.device, engine.dtype, engine.score_layer)
    sharding.reshard(engine.module)
    engine.decoder = order.decoder(plain)
    return engine
