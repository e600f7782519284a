"""The PPO program: `python -m lockstep.trainer.main_ppo key=value ...`. It is the code of the tutorial, with the pieces it leaves open."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import PPOConfig
from lockstep.config.data import EMBEDDED
from lockstep.errors import ConfigError
from lockstep.trainer.run.program import read_run, read_tokenizer, run_program, summarise, worker_group
from lockstep.trainer.run.setup import (
    check_engines,
    fitted_to_models,
    removed_if_refused,
    reward_arguments,
    warm_up_embedded,
    with_embedded_files,
)
from lockstep.utils.terminal import say

if TYPE_CHECKING:
    from lockstep.trainer.ppo.ray_trainer import RayPPOTrainer


def main(arguments: Sequence[str] | None = None, algorithm: str = "ppo") -> int:
    """Train as the command line says; returns the exit status. `--from-verl` takes file and arguments as verl's.

    `algorithm` names a preset of config/presets.py.
    """
    return run_program(arguments, PPOConfig, partial(load, algorithm=algorithm), run, algorithm)


def load(overrides: list[str], config_file: Path | None, algorithm: str = "ppo") -> PPOConfig:
    """The configuration that the command line describes."""
    if "--from-verl" in overrides:
        from lockstep.compat.verl_keys.command import from_verl

        overrides, config_file = from_verl([word for word in overrides if word != "--from-verl"], config_file), None
    try:
        return read_run(PPOConfig, overrides, config_file, algorithm, check_data_named)
    except ConfigError:
        from lockstep.compat.verl_keys.command import check_arguments

        check_arguments(overrides, config_file)  # if keys are verl's, its error says so
        raise


def check_data_named(config: PPOConfig) -> None:
    """Raise ConfigError for a model of the user's without data: the embedded task's words are for the embedded model."""
    model = config.actor_rollout_ref.model.path
    if config.data.train_files == EMBEDDED and model != EMBEDDED:
        raise ConfigError(
            f"actor_rollout_ref.model.path={model} is set but data.train_files is not: the embedded task (write a word backwards) is for "
            "the embedded model; set data.train_files to a parquet, json or jsonl file with a 'prompt' column"
        )


def run(config: PPOConfig) -> None:
    """Train, and say what came of it."""
    with opened(config) as trainer:
        trainer.init_workers()
        result = trainer.fit()
    say(summarise(result, EMBEDDED in (config.data.train_files, config.actor_rollout_ref.model.path)))
    if trainer.device == "cuda":
        import torch

        from lockstep.tools.plan.measured import one_line

        if (line := one_line(config, result.metrics_file, torch.cuda.get_device_name())) is not None:
            print(line)


@contextmanager
def opened(config: PPOConfig) -> Iterator[RayPPOTrainer]:
    """The trainer, before its workers are started; closed at the end."""
    from lockstep.trainer.ppo.episodes import check_named
    from lockstep.utils.device import resolve_device
    from lockstep.workers.rollout.registry import check_installed

    resolve_device(config.trainer.device)
    check_installed(config.actor_rollout_ref.rollout.name)
    check_named(config.agent)
    embedded = EMBEDDED in (config.data.train_files, config.actor_rollout_ref.model.path)
    if not embedded:
        config = fitted_to_models(config)
        check_engines(config)
    with worker_group(config.trainer, config.ray_kwargs, config.needs_ray) as group_cls, ExitStack() as stack:
        with removed_if_refused(config.trainer.run_dir / "embedded_task"):
            if embedded:
                config = fitted_to_models(with_embedded_files(config))
                check_engines(config)
            trainer = stack.enter_context(closing(_trainer(config, group_cls)))
        if embedded:
            warm_up_embedded(config)
        yield trainer


def _trainer(config: PPOConfig, ray_worker_group_cls: Any) -> RayPPOTrainer:
    """The tutorial's code: roles, workers, pools, rewards, trainer."""
    from lockstep.rewards.manager import RewardManager
    from lockstep.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
    from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    model = config.actor_rollout_ref.model
    tokenizer = read_tokenizer(model)

    # The trainer starts no critic and no reference policy that the config does not use.
    role_worker_mapping: dict[Enum, type] = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Critic: TrainingWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
    }
    if model.adapts:  # the actor without its adapters is the reference
        role_worker_mapping = {Role.ActorRolloutRef: ActorRolloutRefWorker, Role.Critic: TrainingWorker}
    global_pool_id = "global_pool"
    resource_pool_spec = {global_pool_id: [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
    mapping: dict[Enum, str] = dict.fromkeys(role_worker_mapping, global_pool_id)
    if config.use_critic and config.critic.enable_resource_pool:
        resource_pool_spec["critic_pool"] = [config.critic.n_gpus_per_node] * config.critic.nnodes
        mapping[Role.Critic] = "critic_pool"

    if config.reward_model.enable:
        role_worker_mapping[Role.RewardModel] = TrainingWorker
        mapping[Role.RewardModel] = global_pool_id
        if config.reward_model.enable_resource_pool:
            resource_pool_spec["reward_pool"] = [config.reward_model.n_gpus_per_node] * config.reward_model.nnodes
            mapping[Role.RewardModel] = "reward_pool"

    judging = reward_arguments(config.reward)
    reward_fn = RewardManager(tokenizer=tokenizer, num_examine=0, **judging)
    val_reward_fn = RewardManager(tokenizer=tokenizer, num_examine=1, **judging)
    resource_pool_manager = ResourcePoolManager(resource_pool_spec=resource_pool_spec, mapping=mapping)

    return RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=role_worker_mapping,
        resource_pool_manager=resource_pool_manager,
        ray_worker_group_cls=ray_worker_group_cls,
        reward_fn=reward_fn,
        val_reward_fn=val_reward_fn,
    )


if __name__ == "__main__":
    sys.exit(main())
