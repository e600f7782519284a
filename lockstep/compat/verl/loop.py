"""verl's trainer for a class that has its own `fit`: verl's attributes, and worker calls on whole batches, over Lockstep's trainer.

`class RayDAPOTrainer(RayPPOTrainer)` with a `fit` takes its `RayPPOTrainer` from `lockstep.compat.verl`, which is `VerlTrainer`. The
stages are those of `trainer.ppo.stages`; the class's `fit` decides on the order, the metrics and when to save.
"""

import atexit
import dataclasses
import importlib.util
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from lockstep.compat.verl import functions
from lockstep.compat.verl.padded import prompt_loader
from lockstep.compat.verl_keys.command import our_config
from lockstep.config import PPOConfig
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base import ClassWithInitArgs, share_rows
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.single_controller.ray import RayWorkerGroup, connect, is_connected
from lockstep.trainer import main_ppo
from lockstep.trainer.ppo import stages
from lockstep.trainer.ppo.metrics import balance_metrics
from lockstep.trainer.ppo.ray_trainer import RayPPOTrainer
from lockstep.trainer.ppo.rewards import model_scores
from lockstep.trainer.ppo.samples import write_samples
from lockstep.trainer.role import Role
from lockstep.trainer.run.launch import ResourcePoolManager
from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

_POOL = "global_pool"
_REWARD_COLUMNS = ("data_source", "reward_model", "extra_info", "uid", "raw_prompt")


class VerlTrainer:
    """The attributes and methods that verl's `fit` uses, over `inner`, which is Lockstep's trainer.

    `config` keeps verl's keys; `inner.config` is what they mean here (`lockstep verl-keys`).
    """

    async_rollout_mode = True
    ref_in_actor = False
    hybrid_engine = True

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: Mapping[Enum, Any],
        resource_pool_manager: Any,
        ray_worker_group_cls: Any = RayWorkerGroup,
        processor: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: Any = None,
    ) -> None:
        ours = our_config(config)
        self.config = config if isinstance(config, DictConfig) else OmegaConf.create(dataclasses.asdict(ours))
        self.tokenizer = tokenizer
        self.resource_pool_manager = resource_pool_manager
        self._scores = reward_fn is None
        roles = {role: ClassWithInitArgs(worker).cls for role, worker in role_worker_mapping.items()}
        self.reward_fn = reward_fn or functions.load_reward_manager(ours, tokenizer)
        self.val_reward_fn = val_reward_fn or functions.load_reward_manager(ours, tokenizer, num_examine=1)
        self.inner = RayPPOTrainer(
            ours,
            tokenizer,
            roles,
            resource_pool_manager,
            ray_worker_group_cls,
            self.reward_fn,
            self.val_reward_fn,
            train_dataset,
            val_dataset,
        )
        self.use_critic = ours.use_critic
        self.use_rm = ours.reward_model.enable
        self.use_reference_policy = ours.use_reference
        self.kl_ctrl_in_reward = self.inner.kl_control
        self.train_dataset = self.inner.train_dataset
        size = OmegaConf.select(self.config, "data.gen_batch_size") or ours.data.train_batch_size
        self.train_dataloader = prompt_loader(
            self.train_dataset,
            self.inner.prompts,
            size,
            ours.data,
            ours.data_seed,
            tokenizer.pad_token_id,
            train_sampler,
            collate_fn,
        )
        self.total_training_steps = ours.trainer.total_training_steps or len(self.train_dataloader) * ours.trainer.total_epochs
        self.inner.total_steps = self.total_training_steps

    @property
    def global_steps(self) -> int:
        """The number of the step."""
        return self.inner.global_steps

    @global_steps.setter
    def global_steps(self, step: int) -> None:
        self.inner.global_steps = step

    _start_profiling = functions.nothing
    _stop_profiling = functions.nothing

    def init_workers(self) -> None:
        """Start the workers and load the models. They end with the process."""
        inner = self.inner
        atexit.register(inner.close)
        inner.init_workers()
        self.actor_rollout_wg = self.actor_wg = self.async_rollout_manager = _Calls(self, inner.actor_wg)
        self.critic_wg = _Calls(self, inner.critic_wg)
        self.rm_wg = _Calls(self, inner.rm_wg)
        self.ref_policy_wg = _Calls(self, inner.ref_policy_wg)

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """The columns that generation reads leave the batch; those that the rewards read stay in it, too."""
        kept = [name for name in _REWARD_COLUMNS if name in batch.non_tensor_batch]
        rest = [name for name in batch.non_tensor_batch if name not in kept]
        prompts = batch.pop(["input_ids", "attention_mask", "position_ids"], rest)
        prompts.non_tensor_batch |= {name: batch.non_tensor_batch[name] for name in kept}
        return prompts

    def _validate(self) -> dict[str, float]:
        return self.inner._validate()

    def _load_checkpoint(self) -> None:
        self.inner._resume()

    def _save_checkpoint(self) -> None:
        draft = self.inner._begin_save({})
        if draft is not None:
            self.inner._saver.publish(*draft, durable=[], waits=True)

    def _balance_batch(self, batch: DataProto, metrics: dict[str, Any], **ignored: Any) -> None:
        """Rows are dealt out by their lengths in every call; this only measures them."""
        metrics |= balance_metrics(batch.token_counts(), share_rows(batch, self.inner.actor_wg.world_size), "global_seqlen")

    def _log_rollout_data(self, batch: DataProto, reward_extra_infos_dict: Any, timing_raw: Any, rollout_data_dir: str) -> None:
        write_samples(rollout_data_dir, self.global_steps, batch, dict(reward_extra_infos_dict), self.tokenizer)


class _Calls:
    """A worker group with verl's calls: a whole batch in, a DataProto out. Every other attribute is the group's own."""

    def __init__(self, trainer: VerlTrainer, group: Any) -> None:
        self._trainer = trainer
        self._group = group
        self._inner = trainer.inner

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._group, name)
        is_measure = name in ("compute_log_prob", "compute_ref_log_prob", "compute_values")
        return (lambda data: call(data.select(["prompts", "responses"], []))) if is_measure else call

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Return prompts, responses, response_mask and rollout_log_probs for input_ids.

        There are rollout.n responses to each prompt, unless the prompts are repeated already, or one greedy response if meta_info has
        do_sample=False. A trainer without a reward_fn also returns rm_scores.
        """
        inner = self._inner
        greedy = prompts.meta_info.get("do_sample") is False
        sampling = dataclasses.replace(inner.sampling, temperature=0.0) if greedy else inner.sampling
        lengths = prompts.batch["attention_mask"].sum(1)
        ids = Ragged.from_padded(prompts.batch["input_ids"], lengths, "left")
        objects = {name: prompts.non_tensor_batch[name] for name in ("index", *_REWARD_COLUMNS) if name in prompts.non_tensor_batch}
        rows = DataProto({"prompts": ids}, objects, {"pad_token_id": self._trainer.tokenizer.pad_token_id})
        given = prompts.non_tensor_batch["raw_prompt_ids"]
        first = [i == 0 or given[i] is not given[i - 1] for i in range(len(given))]  # repeat() repeats the object itself
        n = inner.config.actor_rollout_ref.rollout.n
        if not greedy and n > 1 and all(first):
            rows = rows.repeat(n)
            first = [sample == 0 for _ in given for sample in range(n)]
        places = np.cumsum(first)
        rows.non_tensor_batch.setdefault("index", places.astype(object))
        rows.non_tensor_batch["sample"] = (np.arange(len(first)) - np.flatnonzero(first)[places - 1]).astype(object)
        stages.generate(inner.rollout, rows, sampling, inner.prompts.num_taken)
        extra: dict[str, Any] = {}
        if self._trainer._scores and "data_source" in objects:
            extra = inner.scorer.score(rows, inner.prompts.num_taken)[0].extra
            rows.rename(["token_level_scores"], ["rm_scores"])
        found = rows.select(None, [])
        found.non_tensor_batch = {} if greedy else DataProto({}, extra).non_tensor_batch
        found.meta_info |= {"timing": {}} | ({} if greedy else {"reward_extra_keys": list(extra)})
        return found

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """rm_scores, for the rows that the reward function leaves to the model."""
        rows = data.select(["responses"])
        model_scores(self._group, self._trainer.reward_fn, rows, self._trainer.tokenizer)
        return rows.select(["rm_scores", "rm_judged"], [])

    def update_actor(self, data: DataProto) -> DataProto:
        """ppo_epochs over the batch in mini-batches; the generator has the new weights. meta_info["metrics"] is what there is to tell."""
        inner = self._inner
        numbers = np.arange(len(data), dtype=object)
        objects = {name: data.non_tensor_batch.get(name, numbers) for name in ("index", "sample")}
        updates = self._updates(data, inner.actor_prompts, inner.config.actor_rollout_ref.actor.ppo_epochs)
        rows = DataProto(dict(data.columns), objects, dict(data.meta_info))
        metrics = stages.update_actor(self._group, rows, updates, inner.policy_update)
        stages.sync_weights(inner.weight_exchange)
        return DataProto(meta_info={"metrics": {name: [value] for name, value in metrics.items()}})

    def update_critic(self, data: DataProto) -> DataProto:
        """The same for the critic."""
        rows = DataProto(dict(data.columns), {"index": np.arange(len(data), dtype=object)}, dict(data.meta_info))
        updates = self._updates(data, self._inner.critic_prompts, self._inner.config.critic_epochs)
        metrics = stages.update_critic(self._group, rows, updates)
        return DataProto(meta_info={"metrics": {name: [value] for name, value in metrics.items()}})

    def _updates(self, data: DataProto, num_prompts: int, epochs: int) -> Any:
        config = self._inner.config
        seed = config.trainer.seed + self._inner.global_steps if config.actor_rollout_ref.actor.shuffle else None
        return stages.cut_mini_batches(len(data), 1, num_prompts * config.actor_rollout_ref.rollout.n, epochs, seed)


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
        self.role_worker_mapping[role] = ClassWithInitArgs(worker).cls
        self.mapping[role] = _POOL

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
    run = staticmethod(run_ppo)

    def init_resource_pool_mgr(self, config: Any) -> ResourcePoolManager:
        """One pool of all processes."""
        trainer = our_config(config).trainer
        return ResourcePoolManager({_POOL: [trainer.n_gpus_per_node] * trainer.nnodes}, self.mapping)


_DEFAULTS: dict[str, Any] = {
    "data": {
        "tokenizer": None,
        "train_batch_size": 1024,
        "gen_batch_size": None,
        "reward_fn_key": "data_source",
        "image_key": "images",
        "trust_remote_code": False,
        "return_raw_chat": False,
    },
    "actor_rollout_ref": {
        "hybrid_engine": True,
        "model": {"use_shm": False, "external_lib": None, "use_remove_padding": False},
        "actor": {"ppo_mini_batch_size": 256, "use_dynamic_bsz": False},
        "ref": {"log_prob_use_dynamic_bsz": False},
        "rollout": {
            "mode": "sync",
            "skip_rollout": False,
            "multi_turn": {"enable": False},
            "load_format": "dummy",
            "calculate_log_probs": False,
        },
    },
    "reward": {"reward_manager": {"name": "naive"}, "reward_model": {"enable": False}},
    "reward_model": {
        "reward_manager": "naive",
        "launch_reward_fn_async": False,
        "sandbox_fusion": {"url": None, "max_concurrent": 64, "memory_limit_mb": 1024},
    },
    "custom_reward_function": {"path": None, "name": "compute_score"},
    "trainer": {
        "project_name": "verl_examples",
        "experiment_name": "gsm8k",
        "balance_batch": True,
        "log_val_generations": 0,
        "n_gpus_per_node": 8,
        "total_epochs": 30,
        "save_freq": -1,
        "test_freq": -1,
        "default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "default_hdfs_dir": None,
        "profile_steps": None,
    },
    "global_profiler": {"tool": None, "steps": None, "profile_continuous_steps": False},
    "transfer_queue": {"enable": False},
    "ray_init": {"num_cpus": None, "timeline_json_file": None},
}
"""verl's values of the keys that Lockstep does not have, or has other defaults for, and that verl's programs read by name."""


def _store_for_hydra() -> None:
    """Let Hydra find `ppo_trainer` and `ppo_megatron_trainer`, on which recipes build. Other keys may be set; `our_config` judges them."""
    from hydra.core.config_store import ConfigStore

    tree = OmegaConf.merge(OmegaConf.to_container(OmegaConf.structured(PPOConfig)), _DEFAULTS)
    for section in tree.values():
        OmegaConf.set_struct(section, False)
    for name in ("ppo_trainer", "ppo_megatron_trainer"):
        ConfigStore.instance().store(name=name, node=tree)


if importlib.util.find_spec("hydra") is not None:
    _store_for_hydra()
