"""What a training command would refuse before it loads a model, said by the tools that only look at its configuration."""

import dataclasses
from typing import Any

from lockstep.config.data import EMBEDDED
from lockstep.config.distill import DistillConfig
from lockstep.config.ppo import PPOConfig
from lockstep.config.reward_train import RewardTrainConfig
from lockstep.data.tag import Tag
from lockstep.errors import LockstepError, ResourceError
from lockstep.planner import Device

_OURS = {"fsdp", "fsdp2"}
"""Training engines that need no package which may not be installed where a run is planned."""


def check_run(config: Any, device: Device | None) -> Any:
    """Return the configuration with its lengths fitted to the models. Raise ConfigError or DataError as the training command would on GPUs
    of this kind; None: on the device of trainer.device, here.

    What the tokenizer or the rows decide is not looked at.
    """
    from lockstep.trainer.run.setup import check_engines, check_stage_engine, fitted_to_models

    config = fitted_to_models(config)
    kind = None if device is None else "cuda"
    if isinstance(config, PPOConfig):
        _check_policy(config)
        if config.data.custom_cls.path is None and config.data.train_files != EMBEDDED:
            _check_judges(config, device is None)
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
    return config


def _check_judges(config: PPOConfig, is_here: bool) -> None:
    """Raise what training would for a reward or an environment that cannot be used, and for rows that nothing judges."""
    from lockstep.agents import EpisodeRewards, agent_of, configured_tools
    from lockstep.rewards.manager import RewardManager
    from lockstep.tools.evaluate.scoring import Texts
    from lockstep.trainer.ppo.checks import reads_rewards
    from lockstep.trainer.run.setup import reward_arguments

    manager = RewardManager(tokenizer=Texts(0), num_examine=0, **reward_arguments(config.reward))  # type: ignore[arg-type]
    judge: Any = manager
    try:
        if config.agent.is_on:
            agent = agent_of(config)
            agent.environment_class()
            if not config.agent.mcp:  # whose tools are known when their servers run
                configured_tools(config.agent)
            judge = EpisodeRewards(manager, agent)
        tags = _tags(config.data.train_files)
        if not tags and config.reward.custom_reward_function.path:
            tags = {Tag(None)}
        if reads_rewards(config.algorithm):
            judge.check(tags, has_model=config.reward_model.enable)
        if config.data.val_files:
            has_model = config.reward_model.enable and hasattr(judge, "wants_model")
            judge.check(_tags(config.data.val_files), has_model=has_model, validation=True)
    except ResourceError:  # programs cannot be run on this machine
        if is_here:
            raise
    finally:
        manager.close()


def _tags(files: Any) -> set[Tag]:
    """What the rows of these files say about their rewards; nothing for files that are not there yet."""
    from lockstep.data.row_files import RowFiles

    try:
        rows = RowFiles([files] if isinstance(files, str) else list(files))
    except LockstepError:
        return set()
    names = ("data_source", "reward_model")
    columns = [_column(rows, name) if name in rows.columns else [None] * len(rows) for name in names]
    return set(map(Tag.of, *columns))


def _column(rows: Any, name: str) -> list[Any]:
    found: list[Any] = []
    for _, values in rows.batches(name):
        found += values if isinstance(values, list) else values.to_pylist()
    return found


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
