"""The PPO program: `python -m lockstep.trainer.main_ppo key=value ...`. It is the code of the tutorial, with the pieces it leaves open."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.compat.verl.command import check_arguments, from_verl
from lockstep.config import PPOConfig, load_config
from lockstep.config.data import EMBEDDED
from lockstep.errors import ConfigError, LockstepError
from lockstep.trainer.setup import check_engines, reward_arguments, with_embedded_task

if TYPE_CHECKING:
    from lockstep.trainer.run import FitResult


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit status.

    `--config FILE` reads a YAML file, `--from-verl` takes file and arguments as verl's, `--help` lists the keys.
    """
    # Read when torch loads its OpenMP library. Threads that spin while they wait make a small model many times slower on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in arguments or "-h" in arguments:
        from lockstep.config.reference import command_line_help

        print(command_line_help())
        return 0
    try:
        config_file, overrides = _split_arguments(arguments)
        if "--from-verl" in overrides:
            overrides, config_file = from_verl([word for word in overrides if word != "--from-verl"], config_file), None
        check_arguments(overrides)
        run(load_config(overrides, config_file))
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def run(config: PPOConfig) -> None:
    """Train, and say what came of it."""
    # After the configuration has been checked: these imports bring torch.
    from lockstep.single_controller.ray.cluster import connect, disconnect
    from lockstep.trainer.summary import summarise
    from lockstep.utils.device import resolve_device
    from lockstep.workers.rollout.registry import check_installed

    resolve_device(config.trainer.device)
    check_installed(config.actor_rollout_ref.rollout.name)
    embedded = EMBEDDED in (config.data.train_files, config.actor_rollout_ref.model.path)
    if not embedded:
        check_engines(config)
    uses_ray = config.trainer.worker_group == "ray" or (config.trainer.worker_group == "auto" and config.needs_ray)
    started_ray = uses_ray and connect(**config.ray_kwargs.ray_init)
    try:
        if embedded:
            config = with_embedded_task(config)
            check_engines(config)
        result = _train(config, uses_ray)
    finally:
        if started_ray:
            disconnect()
    print(summarise(result, embedded))


def _train(config: PPOConfig, uses_ray: bool) -> FitResult:
    """The tutorial's code: roles, workers, pools, rewards, trainer."""
    from lockstep.rewards.manager import RewardManager
    from lockstep.single_controller.local import LocalWorkerGroup
    from lockstep.single_controller.ray import RayWorkerGroup
    from lockstep.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
    from lockstep.utils.tokenizer import hf_tokenizer
    from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    model = config.actor_rollout_ref.model
    tokenizer = hf_tokenizer(str(model.path), trust_remote_code=model.trust_remote_code)

    ray_worker_group_cls = RayWorkerGroup if uses_ray else LocalWorkerGroup
    # The trainer starts no critic and no reference policy that the config does not use.
    role_worker_mapping: dict[Enum, type] = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Critic: TrainingWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
    }
    if model.lora_rank:  # the actor without its adapters is the reference
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

    judging = reward_arguments(config)
    reward_fn = RewardManager(tokenizer=tokenizer, num_examine=0, **judging)
    # Validation always uses the function reward.
    val_reward_fn = RewardManager(tokenizer=tokenizer, num_examine=1, **judging)
    resource_pool_manager = ResourcePoolManager(resource_pool_spec=resource_pool_spec, mapping=mapping)

    trainer = RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=role_worker_mapping,
        resource_pool_manager=resource_pool_manager,
        ray_worker_group_cls=ray_worker_group_cls,
        reward_fn=reward_fn,
        val_reward_fn=val_reward_fn,
    )
    try:
        trainer.init_workers()
        return trainer.fit()
    finally:
        trainer.close()


def _split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    if "--config" not in arguments:
        return None, arguments
    at = arguments.index("--config")
    if at + 1 == len(arguments):
        raise ConfigError("--config needs a file name after it")
    return Path(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]


if __name__ == "__main__":
    sys.exit(main())
