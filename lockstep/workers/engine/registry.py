"""Which class stands behind actor.strategy, critic.strategy and reward_model.strategy. Backends are imported when they are chosen."""

from __future__ import annotations

import torch

from lockstep.config.engine import FSDPConfig, ModelConfig, OptimConfig
from lockstep.errors import ConfigError
from lockstep.models.load import Head, load_model, share_structure
from lockstep.workers.engine.base import TrainEngine


def make_engine(
    strategy: str,
    *,
    model: ModelConfig,
    head: Head,
    fsdp: FSDPConfig,
    optim: OptimConfig | None,
    total_updates: int,
    device: torch.device,
    seed: int,
    pad_token_id: int | None = None,
    decoder_attention: str | None = None,
) -> TrainEngine:
    """An engine with its model loaded. `optim` None makes a frozen one, which cannot learn.

    `decoder_attention` also makes `engine.decoder`, a module for generation with that attention function.
    """
    if strategy in ("fsdp", "fsdp2"):
        from lockstep.workers.engine.fsdp.engine import FSDPEngine

        module = load_model(model, head, seed, pad_token_id)
        decoder = share_structure(module, decoder_attention) if decoder_attention else None
        engine = FSDPEngine(
            module,
            head,
            version=1 if strategy == "fsdp" else 2,
            config=fsdp,
            optim=optim,
            total_updates=total_updates,
            device=device,
        )
        engine.decoder = decoder
        return engine
    raise ConfigError(f"strategy={strategy} is not known; choose one of: fsdp, fsdp2")
