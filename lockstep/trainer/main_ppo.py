"""The PPO program: `python -m lockstep.trainer.main_ppo key=value ...`. It is the code of the tutorial, with the pieces it leaves open."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.config import PPOConfig, load_config
from lockstep.config.data import EMBEDDED
from lockstep.errors import ConfigError, LockstepError

if TYPE_CHECKING:
    from lockstep.trainer.ppo.ray_trainer import FitResult


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit status. `--config FILE` reads a YAML file, `--help` lists the keys."""
    # Read when torch loads its OpenMP library. Threads that spin while they wait make a small model many times slower on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in arguments or "-h" in arguments:
        from lockstep.config.reference import command_line_help

        print(command_line_help())
        return 0
    try:
        config_file, overrides = _split_arguments(arguments)
        config = load_config(overrides, config_file)
        run(config)
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

    resolve_device(config.trainer.device)
    uses_ray = config.trainer.worker_group == "ray" or (config.trainer.worker_group == "auto" and config.needs_ray)
    started_ray = uses_ray and connect(**config.ray_kwargs.ray_init)
    try:
        embedded = EMBEDDED in (config.data.train_files, config.actor_rollout_ref.model.path)
        if embedded:
            config = _with_embedded_task(config)
        result = _train(config, uses_ray)
    finally:
        if started_ray:
            disconnect()
    print(summarise(result, embedded))


def _train(config: PPOConfig, uses_ray: bool) -> FitResult:
    """The tutorial's code: roles, workers, pools, rewards, trainer."""
    from lockstep.single_controller.local import LocalWorkerGroup
    from lockstep.single_controller.ray import RayWorkerGroup
    from lockstep.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
    from lockstep.utils.hf_config import read_model_config
    from lockstep.utils.tokenizer import hf_tokenizer
    from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
    from lockstep.workers.reward_manager import RewardManager

    model = config.actor_rollout_ref.model
    read_model_config(str(model.path), model.trust_remote_code)
    tokenizer = hf_tokenizer(str(model.path), trust_remote_code=model.trust_remote_code)

    ray_worker_group_cls = RayWorkerGroup if uses_ray else LocalWorkerGroup
    # The trainer starts no critic and no reference policy that the config does not use.
    role_worker_mapping: dict[Enum, type] = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Critic: TrainingWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
    }
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

    judging = _judging(config)
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


def _judging(config: PPOConfig) -> dict[str, Any]:
    """The arguments of RewardManager that the config decides."""
    from lockstep.sandbox import make_sandbox
    from lockstep.utils.files import load_object
    from lockstep.utils.reward_score import register_score

    reward, custom = config.reward, config.reward.custom_reward_function
    for data_source, reference in reward.rules.items():
        register_score(data_source)(_function(f"reward.rules.{data_source}", reference))
    return {
        "compute_score": functools.partial(load_object(custom.path, custom.name), **custom.reward_kwargs) if custom.path else None,
        "functions": {name: _function(f"reward.functions.{name}", reference) for name, reference in reward.functions.items()},
        "weights": reward.weights,
        "timeout_s": reward.timeout_s,
        "num_workers": reward.num_workers,
        "make_sandbox": functools.partial(
            make_sandbox,
            url=reward.sandbox.url,
            max_concurrent=reward.sandbox.max_concurrent,
            wall_s=reward.sandbox.timeout_s,
            memory_mb=reward.sandbox.memory_limit_mb,
            accept_weak_isolation=reward.sandbox.accept_weak_isolation,
        ),
    }


def _function(key: str, reference: str) -> Callable[..., Any]:
    from lockstep.utils.files import load_reference

    function = load_reference(reference)
    if function is None:
        raise ConfigError(f"{key}={reference} must have the form file.py:function")
    return cast("Callable[..., Any]", function)


def _with_embedded_task(config: PPOConfig) -> PPOConfig:
    """The same configuration with the embedded task's files made and named."""
    from lockstep.embedded import prepare

    directory = config.trainer.run_dir / "embedded_task"
    print(f"the embedded task: write a word backwards. Making data and a model in {directory} ...", flush=True)
    task = prepare(directory, config.trainer.seed)
    print(
        f"supervised warm-up: {task.warmup_steps} steps on careless examples; it writes a word backwards with probability "
        f"{task.warmup_accuracy:.2f}",
        flush=True,
    )
    model = config.actor_rollout_ref.model
    if model.path == EMBEDDED:
        model = dataclasses.replace(model, path=str(task.model))
    train_files = str(task.train_file) if config.data.train_files == EMBEDDED else config.data.train_files
    data = dataclasses.replace(config.data, train_files=train_files, val_files=config.data.val_files or str(task.val_file))
    return dataclasses.replace(config, data=data, actor_rollout_ref=dataclasses.replace(config.actor_rollout_ref, model=model))


def _split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    if "--config" not in arguments:
        return None, arguments
    at = arguments.index("--config")
    if at + 1 == len(arguments):
        raise ConfigError("--config needs a file name after it")
    return Path(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]


if __name__ == "__main__":
    sys.exit(main())
