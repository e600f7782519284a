"""How verl's programs begin: the configuration `ppo_trainer` for Hydra, `run_ppo`, and the `TaskRunner` that recipes derive from."""

from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lockstep.compat.verl.command import accept, leaves
from lockstep.compat.verl.keys import overrides
from lockstep.config import PPOConfig, load_config
from lockstep.single_controller.base import ClassWithInitArgs
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.single_controller.ray import RayWorkerGroup, connect, is_connected
from lockstep.trainer import main_ppo
from lockstep.trainer.resources import ResourcePoolManager
from lockstep.trainer.role import Role
from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

_POOL = "global_pool"


def store_tree() -> None:
    """Let Hydra find `ppo_trainer` and `ppo_megatron_trainer`. Keys that they do not have may be set, and are judged in `our_config`."""
    defaults = OmegaConf.to_container(OmegaConf.structured(PPOConfig))
    tree: Any = OmegaConf.merge(defaults, OmegaConf.load(Path(__file__).with_name("tree.yaml")))
    for section in tree.values():
        OmegaConf.set_struct(section, False)
    for name in ("ppo_trainer", "ppo_megatron_trainer"):
        ConfigStore.instance().store(name=name, node=tree)


def our_config(config: Any) -> PPOConfig:
    """What a configuration with verl's keys means here. Raises ConfigError with all keys that are refused."""
    if isinstance(config, PPOConfig):
        return config
    values: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    said = [verdict for verdict in accept(dict(leaves(values, ""))) if verdict.kind != "default"]  # a whole tree says all there is
    return load_config(overrides(said))


def validate_config(config: Any, use_reference_policy: bool = False, use_critic: bool = False) -> None:
    """Raise ConfigError for a configuration that cannot be run here."""
    our_config(config)


def run_ppo(config: Any, task_runner_class: Any = None) -> None:
    """Train as the configuration says; by the runner's `run`, in this process, where one is given."""
    ours = our_config(config)
    if task_runner_class is None:
        return main_ppo.run(ours)
    if ours.needs_ray and not is_connected():
        connect(**ours.ray_kwargs.ray_init)
    return ClassWithInitArgs(task_runner_class)().run(config)


class TaskRunner:
    """Collects roles and pools; `run` trains."""

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Enum, type] = {}
        self.mapping: dict[Enum, str] = {}

    def _add(self, role: Enum, worker: Any) -> None:
        self.role_worker_mapping[role], self.mapping[role] = ClassWithInitArgs(worker).cls, _POOL

    def add_actor_rollout_worker(self, config: Any) -> tuple[Any, Any]:
        """Adds the actor; its class and that of the worker groups."""
        self._add(Role.ActorRollout, ActorRolloutRefWorker)
        return ActorRolloutRefWorker, RayWorkerGroup if our_config(config).needs_ray else LocalWorkerGroup

    def add_critic_worker(self, config: Any) -> None:
        """Adds the critic; it is started only where the algorithm has one."""
        self._add(Role.Critic, TrainingWorker)

    def add_ref_policy_worker(self, config: Any, ref_policy_cls: Any) -> None:
        """Adds the reference; it is started only where a KL term is on."""
        self._add(Role.RefPolicy, ref_policy_cls)

    def add_reward_model_worker(self, config: Any) -> None:
        """Adds the reward model, where the configuration has one."""
        if our_config(config).reward_model.enable:
            self._add(Role.RewardModel, TrainingWorker)

    add_reward_model_resource_pool = add_reward_model_worker

    def init_resource_pool_mgr(self, config: Any) -> ResourcePoolManager:
        """One pool of all processes."""
        trainer = our_config(config).trainer
        return ResourcePoolManager({_POOL: [trainer.n_gpus_per_node] * trainer.nnodes}, self.mapping)

    def run(self, config: Any) -> None:
        """Train."""
        run_ppo(config)


store_tree()
