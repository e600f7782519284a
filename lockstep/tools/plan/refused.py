"""What a training command would refuse before it loads a model, said by the tools that only look at its configuration."""

import dataclasses
from typing import Any

from lockstep.config.data import EMBEDDED
from lockstep.config.distill import DistillConfig
from lockstep.config.ppo import PPOConfig
from lockstep.config.reward_train import RewardTrainConfig
from lockstep.planner import Device

_OURS = {"fsdp", "fsdp2"}
"""Training engines that need no package which may not be installed where a run is planned."""


def check_run(config: Any, device: Device | None) -> None:
    """Raise ConfigError or DataError as the training command would on GPUs of this kind; None: on the device of trainer.device, here.

    What the tokenizer or the rows decide is not looked at.
    """
    from lockstep.trainer.run.setup import check_engines, check_stage_engine, fitted_to_models

    config = fitted_to_models(config)
    kind = None if device is None else "cuda"
    if isinstance(config, PPOConfig):
        _check_policy(config)
        strategies = {config.actor_rollout_ref.actor.strategy, config.critic.strategy}
        if config.actor_rollout_ref.model.path != EMBEDDED and strategies <= _OURS:
            check_engines(config, kind, None if device is None else device.capability)
    elif config.engine.strategy in _OURS:
        if isinstance(config, DistillConfig):
            for model in (config.model, config.policy().reference_model):
                key = "data.max_length + distill.max_response_length"
                check_stage_engine(dataclasses.replace(config, model=model), config.longest, key, device=kind)
        else:
            check_stage_engine(config, config.data.max_length, scores=isinstance(config, RewardTrainConfig), device=kind)


def _check_policy(config: PPOConfig) -> None:
    from lockstep.trainer.ppo.checks import check_algorithm, check_context

    check_algorithm(config)
    policy = config.actor_rollout_ref
    if policy.model.path == EMBEDDED:
        return
    check_context(policy.model, config)
    if policy.ref.model.path is not None:
        check_context(policy.reference_model, config)
    if config.use_critic and config.critic.model.path:
        check_context(config.critic.model, config)
