"""Training engines on tiny models. They need a process group, so call this inside `run_distributed`."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.config.engine import EngineChoice, ModelConfig, OptimConfig
from lockstep.models.load import Head
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.spec import EngineSpec

OPTIM = OptimConfig(lr=1e-3, clip_grad=0.5, lr_scheduler_type="cosine", lr_warmup_steps=1, min_lr_ratio=0.1)
"""Every setting differs from what does nothing, so that one that is ignored shows."""

TOTAL_UPDATES = 4


def engine_choice(strategy: str = "fsdp2", **section: Any) -> EngineChoice:
    """The strategy with these keys in its section."""
    choice = EngineChoice(strategy)
    for key, value in section.items():
        assert hasattr(choice.engine, key), f"{strategy} has no key {key}"
        setattr(choice.engine, key, value)
    return choice


def make_tiny_engine(
    path: str,
    strategy: str = "fsdp2",
    head: Head = Head.LANGUAGE_MODEL,
    *,
    optim: OptimConfig | None = OPTIM,
    dtype: str = "float32",
    recompute: str | None = None,
    section: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> TrainEngine:
    """An engine on this rank's CPU. `section` and `model` are keys of the strategy's and the model's; `options` go to EngineSpec."""
    return make_engine(
        engine_choice(strategy, **{"dtype": dtype, **(section or {})}),
        EngineSpec(
            model=ModelConfig(
                path=path, enable_gradient_checkpointing=recompute is not None, recompute=recompute or "auto", **(model or {})
            ),
            head=head,
            optim=optim,
            total_updates=TOTAL_UPDATES,
            device=torch.device("cpu"),
            seed=7,
            **options,
        ),
    )
