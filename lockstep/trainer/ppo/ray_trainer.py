"""RayPPOTrainer: one driver, groups of workers, and the loop. `fit` reads as the algorithm; each line of it is a stage.

```text
prompts -> generate -> score -> old_log_prob -> ref_log_prob -> values -> correct -> advantage
        -> update_critic -> update_actor -> sync -> record
```
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.algorithms.kl import make_kl_controller
from lockstep.checkpoint import folders
from lockstep.config.arithmetic import describe
from lockstep.config.load import as_config, to_yaml
from lockstep.config.ppo import PPOConfig
from lockstep.config.sampling import SamplingParams
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.data.schedule import PromptSchedule
from lockstep.observability.display import Display, make_display
from lockstep.observability.metrics import merge_metrics, values
from lockstep.observability.spans import StageTimer
from lockstep.observability.trackers import Tracking, check_trackers
from lockstep.protocol import DataProto
from lockstep.single_controller.base import ClassWithInitArgs, RoleGroup, WorkerGroup, share_rows
from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.trainer.ppo import checks, recording, rewards, stages
from lockstep.trainer.ppo.batches import BatchMaker
from lockstep.trainer.ppo.memory import load_of, place_models
from lockstep.trainer.ppo.metrics import balance_metrics, data_metrics, peak_metrics, row_sums, timing_metrics
from lockstep.trainer.ppo.resources import ResourcePoolManager
from lockstep.trainer.ppo.rewards import Scored
from lockstep.trainer.ppo.role import Role
from lockstep.trainer.ppo.validation import validation_metrics
from lockstep.trainer.ppo.weight_sync import WeightExchange
from lockstep.utils.device import resolve_device
from lockstep.utils.files import load_object
from lockstep.utils.hf_config import stop_token_ids
from lockstep.utils.model_size import count_parameters

__all__ = ["FitResult", "RayPPOTrainer", "ResourcePoolManager", "Role"]

_VALIDATION_STEPS = 1 << 40
"""Added to the step in the sampling key of validation, so that it draws other numbers than training."""
_TRAINED, _FROZEN = 16, 4
"""Bytes a parameter in float32: weight, gradient and two moments; or the weight alone."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """What a run came to."""

    steps: int
    """Steps done in all, those before a resume included."""
    first_validation: dict[str, float]
    """Metrics of the first validation in this run (empty without one)."""
    last_validation: dict[str, float]
    """Metrics of the last."""
    checkpoint: Path | None
    """The newest checkpoint."""
    metrics_file: Path
    """Where every step's metrics are."""


class RayPPOTrainer:
    """Trains a policy with PPO or a relative of it on worker groups of any kind.

    The constructor checks everything that can be checked without a model: config, data, rewards, roles. `init_workers` starts the
    processes and loads the models. `fit` trains. After `init_workers` the groups are `actor_wg`, `rollout_wg`, `critic_wg`,
    `ref_policy_wg`, `rm_wg` (None where the run has none), and all of them are in `worker_groups` by role.
    """

    def __init__(
        self,
        config: PPOConfig | Mapping[str, Any],
        tokenizer: Any,
        role_worker_mapping: Mapping[Enum, type],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type[WorkerGroup] = RayWorkerGroup,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
    ) -> None:
        config = as_config(config)
        self.device = resolve_device(config.trainer.device)
        self.config = config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, device=self.device))
        self.tokenizer, self.reward_fn, self.val_reward_fn = tokenizer, reward_fn, val_reward_fn
        self.role_worker_mapping = checks.needed_roles(config, role_worker_mapping)
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls

        check_trackers(config.trainer.logger)
        checks.check_algorithm(config)
        checks.check_roles(config, self.role_worker_mapping, resource_pool_manager.mapping)
        checks.check_models(config, tokenizer)
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        if train_dataset is None:
            self.train_dataset = open_dataset(config, tokenizer, config.data.train_files, config.data.train_max_samples)
        if val_dataset is None and config.data.val_files:
            self.val_dataset = open_dataset(config, tokenizer, config.data.val_files, config.data.val_max_samples)
        checks.check_rewards(config, reward_fn, val_reward_fn, self.train_dataset, self.val_dataset)
        self.schedule = PromptSchedule(len(self.train_dataset), config.data.train_batch_size, config.data.shuffle, config.data_seed)
        self.total_steps = config.trainer.total_training_steps or self.schedule.steps_per_epoch * config.trainer.total_epochs

        self.global_steps = 0
        self.kl_control = make_kl_controller(
            config.algorithm.kl_ctrl.type,
            config.algorithm.kl_ctrl.kl_coef,
            config.algorithm.kl_ctrl.target_kl,
            config.algorithm.kl_ctrl.horizon,
        )
        self.sampler_drift: float | None = None
        """Largest |log-prob| difference between sampler and trainer at the last measurement; None before the first."""
        self.stop_token_ids = stop_token_ids(str(config.actor_rollout_ref.model.path), tokenizer)
        self.display: Display = make_display()
        self.timer = StageTimer(on_enter=lambda name: self.display.stage(name))
        self.batches = BatchMaker(
            config, tokenizer, self.train_dataset, self.schedule, reward_fn, self.timer, lambda text: self.display.message(text)
        )
        self._groups: list[WorkerGroup] = []
        self.worker_groups: dict[Enum, RoleGroup] = {}

    # -- start -------------------------------------------------------------------------------------------------------------

    def init_workers(self) -> None:
        """Check the resources, start one process for each slot of the pools, and load every role's model.

        No process is left when this fails.
        """
        try:
            self._start_workers()
        except BaseException:
            self.close()
            raise
        self.actor_wg = self._group_of("ActorRolloutRef", "ActorRollout", "Actor")
        self.rollout_wg = self._group_of("ActorRolloutRef", "ActorRollout", "Rollout")
        self.actor_rollout_wg = self.actor_wg
        self.critic_wg = self._group_of("Critic")
        self.ref_policy_wg = self._group_of("RefPolicy", "ActorRolloutRef") if self.config.use_reference else None
        self.rm_wg = self._group_of("RewardModel")
        self.weight_exchange = self._make_weight_exchange()

    def _make_weight_exchange(self) -> WeightExchange | None:
        """None where the actor's workers generate themselves."""
        if self.rollout_wg is self.actor_wg:
            return None
        manager = self.resource_pool_manager.mapping
        pools = {manager[role] for role in self.worker_groups if role.name in ("Actor", "Rollout")}
        return WeightExchange(
            self.actor_wg,
            self.rollout_wg,
            self.config.actor_rollout_ref.rollout,
            same_process=len(pools) == 1 or self.ray_worker_group_cls.in_driver,
            cuda=self.device == "cuda",
        )

    def _start_workers(self) -> None:
        manager = self.resource_pool_manager
        nodes = self.ray_worker_group_cls.nodes()
        manager.create_resource_pool(nodes, self.device == "cuda", self._host_memory(), roles=self.role_worker_mapping)
        by_pool: dict[str, dict[str, Enum]] = {}
        for role in self.role_worker_mapping:
            by_pool.setdefault(manager.mapping[role], {})[str(role)] = role
        for pool, roles in by_pool.items():
            group = self.ray_worker_group_cls(
                manager.resource_pool_dict[pool],
                {name: self._worker(role) for name, role in roles.items()},
                placement=manager.placement[pool],
                device=self.device,
                timeout_s=self.config.trainer.worker_timeout_s,
                start_timeout_s=self.config.trainer.start_timeout_s,
            )
            self._groups.append(group)
            for name, view in group.spawn().items():
                self.worker_groups[roles[name]] = view
        self._place_models(by_pool)
        for view in self.worker_groups.values():
            if hasattr(view, "init_model"):
                view.init_model()

    def _place_models(self, by_pool: Mapping[str, Mapping[str, Enum]]) -> None:
        """Decide, for each device, which models rest in host memory while others work, and say so."""
        if self.ray_worker_group_cls.in_driver:  # one process, one device
            by_pool = {", ".join(by_pool): {name: role for roles in by_pool.values() for name, role in roles.items()}}
        for pool, roles in by_pool.items():
            groups = {role: self.worker_groups[role] for role in roles.values()}
            loads = {role: load_of(self.config, role, group.world_size) for role, group in groups.items()}
            if (line := place_models(pool, groups, loads)) is not None:
                self.display.message(line)

    def close(self) -> None:
        """End the worker processes, and those of the rewards."""
        for group in self._groups:
            group.close()
        self._groups.clear()
        for reward_fn in (self.reward_fn, self.val_reward_fn):
            if hasattr(reward_fn, "close"):
                reward_fn.close()

    # -- the loop ----------------------------------------------------------------------------------------------------------

    def fit(self) -> FitResult:
        """Train until the last step, resuming where the run's folder says so. Validates and saves when due."""
        config = self.config.trainer
        self._load_checkpoint()
        run_dir = config.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(self.config))
        tracking = Tracking(
            config.logger,
            project_name=config.project_name,
            experiment_name=config.experiment_name,
            run_dir=run_dir,
            config=dataclasses.asdict(self.config),
            resume_step=self.global_steps or None,
        )
        validations: list[dict[str, float]] = []
        with tracking, self.display:
            title = f"{config.project_name}/{config.experiment_name}"
            self.display.start(self.total_steps, first_step=self.global_steps, title=title)
            self.display.message(describe(self.config, len(self.train_dataset), self.total_steps, self.device))
            if self.global_steps >= self.total_steps:
                self.display.message(
                    f"nothing to train: the checkpoint is at step {self.global_steps} of {self.total_steps}; raise "
                    "trainer.total_training_steps to go on, or set trainer.resume_mode=disable to start anew"
                )
            if self.val_dataset is not None and (config.val_before_train or config.val_only):
                validations.append(self._validate())
                tracking.log(validations[-1], self.global_steps)
                self.display.step(self.global_steps, validations[-1])
            while self.global_steps < self.total_steps and not config.val_only:
                metrics = self._step()
                if self._is_due(config.test_freq) and self.val_dataset is not None:
                    validations.append(self._validate())
                    metrics |= validations[-1]
                if self._is_due(config.save_freq):
                    with self.timer.stage("save_checkpoint"):
                        self._save_checkpoint()
                for name in ("testing", "save_checkpoint"):
                    if name in self.timer.seconds:
                        metrics[f"timing_s/{name}"] = self.timer.seconds[name]
                tracking.log(metrics, self.global_steps)
                self.display.step(self.global_steps, metrics)
        return FitResult(
            steps=self.global_steps,
            first_validation=validations[0] if validations else {},
            last_validation=validations[-1] if validations else {},
            checkpoint=folders.newest(run_dir),
            metrics_file=run_dir / "metrics.jsonl",
        )

    def _step(self) -> dict[str, float]:
        """One batch of prompts, from generation to the updates. The counter moves on only when all of it has worked."""
        step = self.global_steps + 1
        self.timer.reset()
        with self.timer.stage("step"):
            batch, scored, metrics = self.batches.next(self.rollout_wg, self.rm_wg, self._sampling())
            metrics |= self._old_log_prob(step, batch)
            if self.ref_policy_wg is not None:
                with self.timer.stage("ref"):
                    stages.ref_log_prob(self.ref_policy_wg, batch)
            if self.critic_wg is not None:
                with self.timer.stage("values"):
                    stages.values(self.critic_wg, batch)
            if self._records(step):
                with self.timer.stage("record_batch"):
                    self._record_batch(step, batch, scored)
            metrics |= stages.correct(batch, self.config.algorithm.rollout_correction)
            with self.timer.stage("adv"):
                metrics |= stages.advantage(batch, self.config.algorithm, self.kl_control)
            if self.critic_wg is not None:
                with self.timer.stage("update_critic"):
                    metrics |= stages.update_critic(self.critic_wg, batch, self._critic_mini_batches(step, batch))
            if step > self.config.trainer.critic_warmup:
                with self.timer.stage("update_actor"):
                    update_metrics, drift = stages.update_actor(
                        self.actor_wg, batch, self._actor_mini_batches(step, batch), self.config.actor_rollout_ref.actor
                    )
                    metrics |= update_metrics
                    self._watch_drift(step, batch, drift)
                with self.timer.stage("update_weights"):
                    self._sync_weights()
        self.global_steps = step
        self._dump(self.config.trainer.rollout_data_dir, batch, scored.extra)
        metrics |= self._silent_peaks()
        return metrics | peak_metrics(metrics) | self._record(batch)

    # -- parts of a step ---------------------------------------------------------------------------------------------------

    def _silent_peaks(self) -> dict[str, float]:
        """Peaks of GPU memory of the workers in pools of their own that return no metrics: a rollout, a reference, a reward model."""
        silent = (self.rollout_wg, self.ref_policy_wg, self.rm_wg)
        views = [view for view in silent if view is not None and hasattr(view, "take_peaks")]
        return values(merge_metrics([peaks for view in views for peaks in view.take_peaks()]))

    def _old_log_prob(self, step: int, batch: DataProto) -> dict[str, float]:
        """Compute the old log-probs, unless the sampler's are to be used as they are, or were the trainer's own when last compared, or the
        update computes them itself."""
        bound = self.config.actor_rollout_ref.rollout.exactness_bound
        bypass = self.config.algorithm.rollout_correction.bypass_mode
        if bypass or (self.sampler_drift is not None and self.sampler_drift < bound):
            stages.use_sampler_log_probs(batch)
            return {}
        if self._update_is_the_pass(step, batch):
            return {}
        with self.timer.stage("old_log_prob"):
            metrics = stages.old_log_prob(self.actor_wg, batch)
        self._heed_drift(metrics.get("training/rollout_log_probs_diff_max"), "recomputed")
        return metrics

    def _update_is_the_pass(self, step: int, batch: DataProto) -> bool:
        """Whether the batch's one update is the first to need its old log-probs: then they are what its own forward pass computes."""
        config = self.config
        return (
            step > config.trainer.critic_warmup
            and len(self._actor_mini_batches(step, batch)) == 1
            and not self._records(step)
            and not stages.reads_old_log_probs(config.algorithm, config.actor_rollout_ref.actor)
        )

    def _watch_drift(self, step: int, batch: DataProto, drift: float | None) -> None:
        """Where the old log-prob pass was skipped, the first update measures what that pass would have."""
        if "old_log_prob" in self.timer.seconds or self.config.algorithm.rollout_correction.bypass_mode:
            return
        is_pass = self._update_is_the_pass(step, batch)
        self._heed_drift(drift, "those of the batch's one update itself" if is_pass else "recomputed from the next step on")

    def _heed_drift(self, drift: float | None, old_log_probs_are: str) -> None:
        """Remember how far the sampler was from the trainer, and say so when it is over the bound and was not before."""
        bound = self.config.actor_rollout_ref.rollout.exactness_bound
        was_over = self.sampler_drift is not None and self.sampler_drift >= bound
        self.sampler_drift = drift
        if drift is not None and drift >= bound and not was_over:
            self.display.message(
                f"the sampler's log-probs are {drift:.2g} from the trainer's, over rollout.exactness_bound={bound:g}: "
                f"old log-probs are {old_log_probs_are}"
            )

    def _records(self, step: int) -> bool:
        return self.config.trainer.record_batch_dir is not None and self._is_due(self.config.trainer.record_batch_freq, step)

    def _record_batch(self, step: int, batch: DataProto, scored: Scored) -> None:
        """Save the batch, with columns that other algorithms than the run's read. The run's own batch stays as it is."""
        recorded = batch.select()
        recorded.meta_info["global_step"] = step
        if "reward_baselines" not in recorded:
            self.batches.add_baselines(recorded, self.rollout_wg, self.rm_wg, self._sampling())
        if names := recording.number_parts(scored):
            rewards.set_parts(recorded, scored, names)
        kl_ctrl = dataclasses.replace(self.config.algorithm.kl_ctrl, kl_coef=self.kl_control.value)
        config = dataclasses.replace(self.config, algorithm=dataclasses.replace(self.config.algorithm, kl_ctrl=kl_ctrl))
        folder = Path(str(self.config.trainer.record_batch_dir)) / f"{recording.PREFIX}{step}"
        recording.save_recording(folder, recorded, config, self._policy_weights(), self.tokenizer)
        self.display.message(f"the batch of step {step} is in {folder}")

    def _policy_weights(self) -> list[tuple[str, Any]]:
        assert self.actor_wg is not None
        (weights,) = (w for w in self.actor_wg.export_weights() if w is not None)
        return weights

    def _sync_weights(self) -> None:
        """A rollout in workers of its own gets the new weights. One in the actor's workers has them when it generates."""
        if self.weight_exchange is not None:
            self.weight_exchange.sync()

    def _record(self, batch: DataProto) -> dict[str, float]:
        data = self.config.data
        assert self.actor_wg is not None
        shares = share_rows(batch, self.actor_wg.world_size)
        metrics = data_metrics(batch, data.max_response_length, data.max_prompt_length)
        metrics |= balance_metrics(batch, shares)
        metrics |= timing_metrics(batch, self.timer.seconds, self.resource_pool_manager.get_n_gpus())
        metrics["training/global_step"] = self.global_steps
        metrics["training/epoch"] = self.schedule.epoch(self.batches.num_taken - 1)
        return metrics

    def _sampling(self, validation: bool = False) -> SamplingParams:
        rollout = self.config.actor_rollout_ref.rollout
        source = rollout.val_kwargs if validation else rollout
        return SamplingParams(
            temperature=source.temperature,
            top_k=source.top_k,
            top_p=source.top_p,
            min_p=source.min_p,
            repetition_penalty=source.repetition_penalty,
            max_tokens=self.config.data.max_response_length,
            stop_token_ids=self.stop_token_ids,
            stop=tuple(rollout.stop),
            seed=self.config.trainer.seed,
        )

    def _actor_mini_batches(self, step: int, batch: DataProto | None = None) -> list[Any]:
        actor = self.config.actor_rollout_ref.actor
        return self._mini_batches(self.config.actor_mini_batch_prompts, actor.ppo_epochs, step, batch)

    def _critic_mini_batches(self, step: int, batch: DataProto | None = None) -> list[Any]:
        return self._mini_batches(self.config.critic_mini_batch_prompts, self.config.critic_epochs, step, batch)

    def _mini_batches(self, size: int, epochs: int, step: int, batch: DataProto | None) -> list[Any]:
        """Row numbers of each update; without a batch, of a full one."""
        n = self.config.actor_rollout_ref.rollout.n
        prompts = self.config.data.train_batch_size if batch is None else len(batch) // n
        seed = self.config.trainer.seed + step if self.config.actor_rollout_ref.actor.shuffle else None
        return stages.cut_mini_batches(prompts, n, size, epochs, seed)

    def _is_due(self, frequency: int, step: int | None = None) -> bool:
        """At every `frequency`-th step (the one just done, unless named) and at the last one; -1 at the last only, 0 never."""
        step = self.global_steps if step is None else step
        return frequency != 0 and (step == self.total_steps or (frequency > 0 and step % frequency == 0))

    # -- validation --------------------------------------------------------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        """Generate on the validation prompts with rollout.val_kwargs and score them with the function reward."""
        config = self.config.trainer
        with self.timer.stage("testing"):
            n = self.config.actor_rollout_ref.rollout.val_kwargs.n
            rows = range(len(self.val_dataset))
            size = self.config.data.val_batch_size or len(rows)
            parts, all_scored = [], []
            for start in range(0, len(rows), size):
                batch = stages.make_prompts(self.val_dataset, rows[start : start + size], n, self.tokenizer.pad_token_id)
                scoring = self.val_reward_fn.begin(batch) if hasattr(self.val_reward_fn, "begin") else None
                on_finished = scoring.add if scoring is not None else None
                key = self.global_steps + _VALIDATION_STEPS
                stages.generate(self.rollout_wg, batch, self._sampling(validation=True), key, on_finished)
                all_scored.append(rewards.score(self.val_reward_fn, batch, self.config.reward.max_failure_rate, scoring))
                rewards.record_failures(config.run_dir, self.global_steps, batch, all_scored[-1], self.tokenizer)
                parts.append(batch)
            batch, scored = DataProto.concat(parts), Scored.concat(all_scored)
            extra: dict[str, list[Any]] = {"reward": scored.total} | scored.extra
            extra.pop("score", None)
            self._dump(self.config.trainer.validation_data_dir, batch, extra)
            sources = list(batch.non_tensor_batch.get("data_source", ["unknown"] * len(batch)))
            return validation_metrics(sources, [row // n for row in range(len(batch))], extra, scored.failures)

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        run_dir = self.config.trainer.run_dir
        with folders.publishing(run_dir, self.global_steps) as folder:
            # Workers may run in another folder than the driver.
            target = Path(os.path.abspath(folder))
            assert self.actor_wg is not None
            self.actor_wg.save_checkpoint(str(target / "actor"))
            self.tokenizer.save_pretrained(target / "actor")
            if self.critic_wg is not None:
                self.critic_wg.save_checkpoint(str(target / "critic"))
            state = {
                "global_steps": self.global_steps,
                "num_prompt_batches": self.batches.num_taken,
                "kl_control": self.kl_control.state_dict(),
                "sampler_drift": self.sampler_drift,
                "num_train_rows": len(self.train_dataset),
            }
            folders.write_state(target, state)
        folders.prune(run_dir, self.config.trainer.max_ckpt_to_keep)

    def _load_checkpoint(self) -> None:
        config = self.config.trainer
        folder = folders.newest(config.run_dir) if config.resume_mode == "auto" else None
        if config.resume_mode == "resume_path":
            folder = Path(str(config.resume_from_path))
        if folder is None:
            return
        state = folders.read_state(folder)
        source = Path(os.path.abspath(folder))
        assert self.actor_wg is not None
        self.actor_wg.load_checkpoint(str(source / "actor"))
        if self.critic_wg is not None:
            self.critic_wg.load_checkpoint(str(source / "critic"))
        self.global_steps, self.batches.num_taken = state["global_steps"], state["num_prompt_batches"]
        self.kl_control.load_state_dict(state["kl_control"])
        self.sampler_drift = state["sampler_drift"]
        self._sync_weights()
        self.display.message(f"resuming from {folder} at step {self.global_steps}")
        if state["num_train_rows"] != len(self.train_dataset):
            self.display.message(
                f"warning: the checkpoint saw {state['num_train_rows']} training prompts, now there are {len(self.train_dataset)}; "
                "the order of prompts is a new one"
            )

    # -- helpers -----------------------------------------------------------------------------------------------------------

    def _group_of(self, *names: str) -> RoleGroup | None:
        """The group of the first role, of any Enum, that has one of these names."""
        for name in names:
            for role, group in self.worker_groups.items():
                if role.name == name:
                    return group
        return None

    def _worker(self, role: Enum) -> ClassWithInitArgs:
        """A role's class with its section of the config."""
        config, cls, seed = self.config, self.role_worker_mapping[role], self.config.trainer.seed
        if role.name == "Critic":
            model = dataclasses.replace(config.critic.model, path=config.critic.model.path or config.actor_rollout_ref.model.path)
            section = dataclasses.replace(config.critic, model=model)
            updates = self.total_steps * len(self._critic_mini_batches(0))
            return ClassWithInitArgs(cls, config=section, role="critic", seed=seed, total_updates=updates)
        if role.name == "RewardModel":
            return ClassWithInitArgs(cls, config=config.reward_model, role="rm", seed=seed)
        if role.name in Role.__members__:
            return ClassWithInitArgs(
                cls,
                config=config.actor_rollout_ref,
                role="actor_rollout" if role.name == "ActorRolloutRef" and not config.use_reference else str(Role[role.name]),
                seed=seed,
                pad_token_id=self.tokenizer.pad_token_id,
                total_updates=(self.total_steps - config.trainer.critic_warmup) * len(self._actor_mini_batches(0)),
                max_response_length=config.data.max_response_length,
            )
        return ClassWithInitArgs(cls, config)

    def _host_memory(self) -> dict[str, int]:
        """Bytes a process of each pool needs for its models; on GPUs they are not in host memory."""
        needed: dict[str, int] = dict.fromkeys(self.resource_pool_manager.resource_pool_spec, 0)
        if self.device == "cuda":
            return needed
        bytes_of = {"Actor": _TRAINED, "ActorRollout": _TRAINED, "ActorRolloutRef": _TRAINED + _FROZEN, "Critic": _TRAINED}
        for role in self.role_worker_mapping:
            pool = self.resource_pool_manager.mapping[role]
            path = {
                "Critic": self.config.critic.model.path or self.config.actor_rollout_ref.model.path,
                "RewardModel": self.config.reward_model.model.path,
            }.get(role.name, self.config.actor_rollout_ref.model.path)
            parameters = count_parameters(str(path)) if role.name in Role.__members__ else None
            processes = sum(self.resource_pool_manager.resource_pool_spec[pool])
            needed[pool] += (parameters or 0) * bytes_of.get(role.name, _FROZEN) // processes
        return needed

    def _dump(self, directory: str | None, batch: DataProto, info: dict[str, list[Any]]) -> None:
        """One JSONL file with the text, the score and everything the reward function said of each row."""
        if directory is None:
            return
        Path(directory).mkdir(parents=True, exist_ok=True)
        decode = self.tokenizer.batch_decode
        inputs = decode([row.tolist() for row in batch.ragged("prompts").rows()], skip_special_tokens=True)
        outputs = decode([row.tolist() for row in batch.ragged("responses").rows()], skip_special_tokens=True)
        scores = row_sums(batch, "token_level_scores").tolist()
        truths = [(row or {}).get("ground_truth") for row in batch.non_tensor_batch.get("reward_model", [None] * len(batch))]
        with (Path(directory) / f"{self.global_steps}.jsonl").open("w") as file:
            for i in range(len(batch)):
                row = {"step": self.global_steps, "input": inputs[i], "output": outputs[i], "gts": truths[i], "score": scores[i]}
                row |= {key: values[i] for key, values in info.items() if key not in row}
                file.write(json.dumps(row, default=str) + "\n")


def open_dataset(config: PPOConfig, tokenizer: Any, files: Any, max_samples: int) -> Any:
    """The rows of these files, in the dataset class that the config names."""
    custom = config.data.custom_cls
    cls = load_object(custom.path, str(custom.name)) if custom.path else RLHFDataset
    return cls(files, tokenizer, dataclasses.replace(config.data, seed=config.data_seed), max_samples)
