"""Which backend stands behind actor.strategy, critic.strategy and reward_model.strategy. It is imported when it is chosen."""

from importlib import import_module
from typing import Any

import torch.distributed as dist

from lockstep.config.check import one_of
from lockstep.config.engine import STRATEGIES, EngineChoice, check_learner
from lockstep.errors import ConfigError
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.spec import EngineSpec

_BACKENDS = {
    "fsdp": ("lockstep.workers.engine.fsdp", "fsdp_config"),
    "fsdp2": ("lockstep.workers.engine.fsdp", "fsdp_config"),
    "megatron": ("lockstep.backends.megatron", "megatron"),
    "torchtitan": ("lockstep.backends.torchtitan", "torchtitan"),
    "veomni": ("lockstep.backends.veomni", "veomni"),
}
"""Strategy -> its package, and its keys in EngineChoice. Each package has make.py with `make(choice, spec)`, and check.py with `check`,
which imports nothing that may not be installed."""


def make_engine(choice: EngineChoice, spec: EngineSpec) -> TrainEngine:
    """An engine with its model loaded. Raises ConfigError, before the model is loaded, for a model or a layout that the backend cannot
    do."""
    check_learner(spec.model, choice, "actor", "model")
    check_engine(choice, spec.hf_config(), dist.get_world_size(), spec.device.type)
    engine: TrainEngine = import_module(f"{_backend(choice)[0]}.make").make(choice, spec)
    return engine


def check_engine(choice: EngineChoice, hf_config: Any, world_size: int, device_type: str, key: str | None = None) -> None:
    """Raise ConfigError unless `world_size` ranks can hold a model of `hf_config` in the chosen engine; loads nothing.

    `device_type` is cpu or cuda, and `key` is where the choice stands in the configuration, such as actor_rollout_ref.actor.
    """
    if not getattr(hf_config.get_text_config(), "num_attention_heads", None):
        raise ConfigError(
            f"a {hf_config.model_type} has no attention heads: the rows of a micro-batch are packed, and attention keeps them apart; "
            "choose a model with causal softmax attention"
        )
    package, section = _backend(choice)
    where = f"{key}.{section}" if key else section
    import_module(f"{package}.check").check(choice, hf_config, world_size, device_type, where)


def _backend(choice: EngineChoice) -> tuple[str, str]:
    one_of("strategy", choice.strategy, STRATEGIES)
    return _BACKENDS[choice.strategy]
