"""The workers of PPO's roles, from its configuration; and the way of weights between an Actor and a Rollout in separate workers.

Tensors do not pass through the driver:

```text
offer -> receive                            ipc, disk: the weights lie ready before anybody reads
offer -> send + receive at the same time    broadcast
then: every receiver's manifest equals the sender's, or the run ends
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any

from lockstep.config.actor_rollout_ref import RolloutConfig, choose_weight_sync
from lockstep.config.ppo import PPOConfig
from lockstep.errors import WeightSyncError, WorkerError
from lockstep.models.weight_files import count_parameters
from lockstep.planner import Load
from lockstep.single_controller.base import ClassWithInitArgs
from lockstep.trainer.role import Role
from lockstep.trainer.run.launch import FROZEN, TRAINED, RoleSpec, Workers

_BYTES = {"Actor": TRAINED, "ActorRollout": TRAINED, "ActorRolloutRef": TRAINED, "Critic": TRAINED}


def role_specs(config: PPOConfig, classes: Mapping[Enum, type], total_steps: int, pad_token_id: int) -> dict[Enum, RoleSpec]:
    """Return the class of each role with its section of the config."""
    return {
        role: RoleSpec(
            _worker(config, role, cls, total_steps, pad_token_id), partial(load_of, config, role), _host_bytes(config, role)
        )
        for role, cls in classes.items()
    }


def learns_values(classes: Mapping[Enum, type]) -> bool:
    """Return whether the critic's update can give its values. Not if its class overrides `compute_values` or `update_critic`, which
    `learn_values` would not call."""
    critic = next((ClassWithInitArgs(cls).cls for role, cls in classes.items() if role.name == "Critic"), object)
    names = ("learn_values", "compute_values", "update_critic")
    owners = {next((base for base in critic.__mro__ if name in vars(base)), None) for name in names}
    return len(owners) == 1 and None not in owners


def weight_exchange(workers: Workers, config: PPOConfig) -> WeightExchange | None:
    """Return the exchange from Actor to Rollout; None if the actor's workers generate themselves."""
    actor = workers.find("Actor")
    rollout = workers.find("Rollout")
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
    """Return what one of `ranks` ranks of this role computes at once."""
    data = config.data
    n = config.actor_rollout_ref.rollout.n
    mini_batch = config.critic_mini_batch_prompts if role.name == "Critic" else config.actor_mini_batch_prompts
    return Load(
        longest=data.max_prompt_length + data.max_response_length,
        step_rows=-(-data.train_batch_size * n // ranks),
        update_rows=-(-mini_batch * n // ranks),
    )


def _worker(config: PPOConfig, role: Enum, cls: type, total_steps: int, pad_token_id: int) -> ClassWithInitArgs:
    seed = config.trainer.seed
    name = role.name
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


def _host_bytes(config: PPOConfig, role: Enum) -> int:
    """Return the bytes of the role's models in host memory: none on GPUs."""
    if config.trainer.device == "cuda" or role.name not in Role.__members__:
        return 0
    policy = config.actor_rollout_ref.model.path
    reference = config.actor_rollout_ref.reference_model.path
    paths = {"Critic": config.critic.model.path or policy, "RewardModel": config.reward_model.model.path, "RefPolicy": reference}
    own = (count_parameters(str(paths.get(role.name, policy))) or 0) * _BYTES.get(role.name, FROZEN)
    return own + (count_parameters(str(reference)) or 0) * FROZEN * (role.name == "ActorRolloutRef")


class WeightExchange:
    """Keeps the rollout's workers up to date with the actor's.

    `same_process`: a worker of one is in the process of a worker of the other. Raise ConfigError if `config.weight_sync` cannot work.
    """

    def __init__(self, actor: Any, rollout: Any, config: RolloutConfig, *, same_process: bool, cuda: bool) -> None:
        self._actor = actor
        self._rollout = rollout
        machines = {*actor.machine(), *rollout.machine()}
        self.method = choose_weight_sync(
            config.weight_sync, config.name, hybrid=False, same_process=same_process, same_machine=len(machines) == 1, cuda=cuda
        )
        self._version = 0

    def sync(self) -> None:
        """Send the actor's present weights. Raise WeightSyncError unless every worker of the rollout has exactly them."""
        self._version += 1
        offer = _only(self._actor.offer_weights(self.method, self._version, self._rollout.world_size))
        try:
            receiving = self._rollout.receive_weights(offer)
            sent = offer.manifest
            if sent is None:
                try:
                    sent = _only(self._actor.send_weights().get())
                except WorkerError:
                    receiving.get()  # if a receiver failed first, its error says more
                    raise
            received = receiving.get()
        finally:
            self._actor.withdraw_weights()
        for rank, manifest in enumerate(received):
            if manifest != sent:
                different = sorted(name for name in {*sent, *manifest} if sent.get(name) != manifest.get(name))
                raise WeightSyncError(
                    f"rank {rank} of the rollout did not get the weights of version {self._version}: {len(different)} of {len(sent)} "
                    f"tensors differ, first {different[0]}"
                )


def _only(answers: list[Any]) -> Any:
    """Return rank 0's answer; the others answer None."""
    (answer,) = (answer for answer in answers if answer is not None)
    return answer
