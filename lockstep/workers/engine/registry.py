"""Which backend stands behind actor.strategy, critic.strategy and reward_model.strategy. It is imported when it is chosen."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lockstep.config.engine import STRATEGIES, EngineChoice, ModelConfig, OptimConfig, check_lora
from lockstep.errors import ConfigError
from lockstep.models.load import Head
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.order import EngineOrder


class _Backend(NamedTuple):
    folder: str
    """Here, with check.py and make.py."""
    section: str
    """Its keys in EngineChoice."""
    make: str
    """In make.py: (choice, order) -> engine. In check.py all have `check`, which imports no package that may be missing."""


_BACKENDS = {
    "fsdp": _Backend("fsdp", "fsdp_config", "make_fsdp_engine"),
    "fsdp2": _Backend("fsdp", "fsdp_config", "make_fsdp_engine"),
    "megatron": _Backend("megatron", "megatron", "make_megatron_engine"),
    "torchtitan": _Backend("torchtitan", "torchtitan", "make_torchtitan_engine"),
    "veomni": _Backend("veomni", "veomni", "make_veomni_engine"),
}


def make_engine(
    choice: EngineChoice,
    *,
    model: ModelConfig,
    head: Head,
    optim: OptimConfig | None,
    total_updates: int,
    device: torch.device,
    seed: int,
    pad_token_id: int | None = None,
    decoder_attention: str | None = None,
    max_tokens: int | None = None,
) -> TrainEngine:
    """An engine with its model loaded. `optim` None makes a frozen one, which cannot learn.

    `decoder_attention` also makes `engine.decoder`, a module for generation with that attention function. `max_tokens`, the tokens of
    the largest micro-batch where that is known, decides how much model.recompute=auto recomputes. Raises ConfigError, before the model
    is loaded, for a model or a layout that the backend cannot do.
    """
    order = EngineOrder(
        model=model, head=head, optim=optim, total_updates=total_updates, device=device, seed=seed, pad_token_id=pad_token_id,
        decoder_attention=decoder_attention, max_tokens=max_tokens,
    )  # fmt: skip
    check_lora(model, choice, "actor", "model")
    check_engine(choice, order.hf_config(), dist.get_world_size(), device.type)
    backend = _backend(choice.strategy)
    engine: TrainEngine = getattr(import_module(f"{__package__}.{backend.folder}.make"), backend.make)(choice, order)
    return engine


def check_engine(choice: EngineChoice, hf_config: Any, world_size: int, device_type: str, key: str | None = None) -> None:
    """Raise ConfigError unless `world_size` ranks can hold a model of `hf_config` in the chosen engine; loads nothing.

    `device_type` is cpu or cuda, and `key` is where the choice stands in the configuration, such as actor_rollout_ref.actor.
    """
    backend = _backend(choice.strategy)
    section = f"{key}.{backend.section}" if key else backend.section
    import_module(f"{__package__}.{backend.folder}.check").check(choice, hf_config, world_size, device_type, section)


def _backend(strategy: str) -> _Backend:
    if strategy not in _BACKENDS:
        raise ConfigError(f"strategy={strategy} is not known; choose one of: {', '.join(STRATEGIES)}")
    return _BACKENDS[strategy]
