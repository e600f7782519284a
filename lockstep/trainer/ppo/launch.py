"""Workers: from roles and pools to groups of running workers, each with its model on its device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from lockstep.config.ppo import PPOConfig
from lockstep.single_controller.base import ClassWithInitArgs, RoleGroup, WorkerGroup
from lockstep.trainer.ppo.memory import load_of, place_models
from lockstep.trainer.ppo.resources import ResourcePoolManager
from lockstep.trainer.ppo.role import Role
from lockstep.trainer.ppo.weight_sync import WeightExchange
from lockstep.utils.model_size import count_parameters

_TRAINED, _FROZEN = 16, 4
"""Bytes per parameter in float32: weight, gradient and two moments; or the weight alone."""
_BYTES = {"Actor": _TRAINED, "ActorRollout": _TRAINED, "ActorRolloutRef": _TRAINED + _FROZEN, "Critic": _TRAINED}


@dataclass
class Workers:
    """The workers of a run. Roles may be members of any Enum: what the trainer does with one depends on its name alone."""

    config: PPOConfig
    classes: Mapping[Enum, type]
    """The class of each role."""
    manager: ResourcePoolManager
    """The pool of each role."""
    group_cls: type[WorkerGroup]
    say: Callable[[str], None]
    """Tells the user something."""
    groups: list[WorkerGroup] = field(default_factory=list)
    """One per pool, once started."""
    by_role: dict[Enum, RoleGroup] = field(default_factory=dict)
    """The workers of each role, once started."""

    def start(self, total_steps: int, pad_token_id: int) -> None:
        """Check the resources, start a process for each slot of the pools, and load every role's model.

        No process is left when this fails.
        """
        try:
            self._start(total_steps, pad_token_id)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for group in self.groups:
            group.close()
        self.groups.clear()

    def find(self, *names: str) -> RoleGroup | None:
        """The workers of the first role, of any Enum, that has one of these names."""
        by_name = {role.name: group for role, group in self.by_role.items()}
        return next((by_name[name] for name in names if name in by_name), None)

    def weight_exchange(self) -> WeightExchange | None:
        """From Actor to Rollout; None where the actor's workers generate themselves."""
        actor, rollout = self.find("Actor"), self.find("Rollout")
        if actor is None or rollout is None:
            return None
        pools = {self.manager.mapping[role] for role in self.by_role if role.name in ("Actor", "Rollout")}
        return WeightExchange(
            actor,
            rollout,
            self.config.actor_rollout_ref.rollout,
            same_process=len(pools) == 1 or self.group_cls.in_driver,
            cuda=self.config.trainer.device == "cuda",
        )

    def _start(self, total_steps: int, pad_token_id: int) -> None:
        trainer, manager = self.config.trainer, self.manager
        manager.create_resource_pool(self.group_cls.nodes(), trainer.device == "cuda", self._host_memory(), roles=self.classes)
        by_pool: dict[str, dict[str, Enum]] = {}
        for role in self.classes:
            by_pool.setdefault(manager.mapping[role], {})[str(role)] = role
        for pool, roles in by_pool.items():
            group = self.group_cls(
                manager.resource_pool_dict[pool],
                {name: self._worker(role, total_steps, pad_token_id) for name, role in roles.items()},
                placement=manager.placement[pool],
                device=trainer.device,
                timeout_s=trainer.worker_timeout_s,
                start_timeout_s=trainer.start_timeout_s,
            )
            self.groups.append(group)
            for name, view in group.spawn().items():
                self.by_role[roles[name]] = view
        self._place_models(by_pool)
        for view in self.by_role.values():
            if hasattr(view, "init_model"):
                view.init_model()

    def _worker(self, role: Enum, total_steps: int, pad_token_id: int) -> ClassWithInitArgs:
        """A role's class with its section of the config."""
        config, cls, seed, name = self.config, self.classes[role], self.config.trainer.seed, role.name
        batch = config.data.train_batch_size
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

    def _place_models(self, by_pool: Mapping[str, Mapping[str, Enum]]) -> None:
        """Decide, for each device, which models are offloaded while others work, and say so."""
        if self.group_cls.in_driver:  # one process, one device
            by_pool = {", ".join(by_pool): {name: role for roles in by_pool.values() for name, role in roles.items()}}
        for pool, roles in by_pool.items():
            groups = {role: self.by_role[role] for role in roles.values()}
            loads = {role: load_of(self.config, role, group.world_size) for role, group in groups.items()}
            if (line := place_models(pool, groups, loads)) is not None:
                self.say(line)

    def _host_memory(self) -> dict[str, int]:
        """Bytes that a process of each pool needs for its models; on GPUs they are not in host memory."""
        config, manager = self.config, self.manager
        needed: dict[str, int] = dict.fromkeys(manager.resource_pool_spec, 0)
        if config.trainer.device == "cuda":
            return needed
        policy = config.actor_rollout_ref.model.path
        paths = {"Critic": config.critic.model.path or policy, "RewardModel": config.reward_model.model.path}
        for role in self.classes:
            if role.name in Role.__members__:
                pool = manager.mapping[role]
                parameters = count_parameters(str(paths.get(role.name, policy))) or 0
                needed[pool] += parameters * _BYTES.get(role.name, _FROZEN) // sum(manager.resource_pool_spec[pool])
        return needed
