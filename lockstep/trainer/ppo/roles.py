"""What the workers of PPO's roles are, from its configuration."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from functools import partial

from lockstep.config.ppo import PPOConfig
from lockstep.models.weight_files import count_parameters
from lockstep.planner import Load
from lockstep.single_controller.base import ClassWithInitArgs
from lockstep.trainer.ppo.weight_sync import WeightExchange
from lockstep.trainer.role import Role
from lockstep.trainer.run.launch import FROZEN, TRAINED, RoleSpec, Workers

_BYTES = {"Actor": TRAINED, "ActorRollout": TRAINED, "ActorRolloutRef": TRAINED, "Critic": TRAINED}


def role_specs(config: PPOConfig, classes: Mapping[Enum, type], total_steps: int, pad_token_id: int) -> dict[Enum, RoleSpec]:
    """The class of each role with its section of the config."""
    return {
        role: RoleSpec(
            _worker(config, role, cls, total_steps, pad_token_id), partial(load_of, config, role), _host_bytes(config, role)
        )
        for role, cls in classes.items()
    }


def learns_values(classes: Mapping[Enum, type]) -> bool:
    """Whether the critic's class has its values come with its update. Not where it has a `compute_values` or an `update_critic` of its
    own, which `learn_values` would pass over."""
    critic = next((ClassWithInitArgs(cls).cls for role, cls in classes.items() if role.name == "Critic"), object)
    names = ("learn_values", "compute_values", "update_critic")
    owners = {next((base for base in critic.__mro__ if name in vars(base)), None) for name in names}
    return len(owners) == 1 and None not in owners


def weight_exchange(workers: Workers, config: PPOConfig) -> WeightExchange | None:
    """From Actor to Rollout; None where the actor's workers generate themselves."""
    actor, rollout = workers.find("Actor"), workers.find("Rollout")
    if actor is None or rollout is None:
        return None
    pools = {workers.manager.mapping[role] for role in workers.by_role if role.name in ("Actor", "Rollout")}
    return WeightExchange(
        actor,
        rollout,
        config.actor_rollout_ref.rollout,
        same_process=len(pools) == 1 or workers.group_cls.in_driver,
        cuda=config.trainer.device == "cuda",
    )


def load_of(config: PPOConfig, role: Enum, ranks: int) -> Load:
    """What one of `ranks` ranks of this role computes at once."""
    data, n = config.data, config.actor_rollout_ref.rollout.n
    mini_batch = config.critic_mini_batch_prompts if role.name == "Critic" else config.actor_mini_batch_prompts
    return Load(
        longest=data.max_prompt_length + data.max_response_length,
        step_rows=-(-data.train_batch_size * n // ranks),
        update_rows=-(-mini_batch * n // ranks),
    )


def _worker(config: PPOConfig, role: Enum, cls: type, total_steps: int, pad_token_id: int) -> ClassWithInitArgs:
    seed, name, batch = config.trainer.seed, role.name, config.data.train_batch_size
    if name == "Critic":
        model = dataclasses.replace(config.critic.model, path=config.critic.model.path or config.actor_rollout_ref.model.path)
        section = dataclasses.replace(config.critic, model=model)
        updates = total_steps * config.critic_epochs * -(-batch // config.critic_mini_batch_prompts)
        return ClassWithInitArgs(cls, config=section, role="critic", seed=seed, total_updates=updates)
    if name == "RewardModel":
        return ClassWithInitArgs(cls, config=config.reward_model, role="rm", seed=seed)
    if name not in Role.__members__:
        return ClassWithInitArgs(cls, config)
    per_step = config.actor_rollout_ref.actor.ppo_epochs * -(-batch // config.actor_mini_batch_prompts)
    return ClassWithInitArgs(
        cls,
        config=config.actor_rollout_ref,
        role="actor_rollout" if name == "ActorRolloutRef" and not config.use_reference else str(Role[name]),
        seed=seed,
        pad_token_id=pad_token_id,
        total_updates=(total_steps - config.trainer.critic_warmup) * per_step,
        max_response_length=config.data.max_response_length,
    )


def _host_bytes(config: PPOConfig, role: Enum) -> int:
    """Bytes of the role's models in host memory; on GPUs they are not there."""
    if config.trainer.device == "cuda" or role.name not in Role.__members__:
        return 0
    policy, reference = config.actor_rollout_ref.model.path, config.actor_rollout_ref.reference_model.path
    paths = {"Critic": config.critic.model.path or policy, "RewardModel": config.reward_model.model.path, "RefPolicy": reference}
    own = (count_parameters(str(paths.get(role.name, policy))) or 0) * _BYTES.get(role.name, FROZEN)
    return own + (count_parameters(str(reference)) or 0) * FROZEN * (role.name == "ActorRolloutRef")
