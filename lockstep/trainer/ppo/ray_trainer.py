"""RayPPOTrainer: one driver, groups of workers, and the step of PPO and its relatives. `_step` reads as the algorithm:

```text
generate -> score -> old_log_prob -> ref_log_prob -> values -> correct -> shape_rewards -> estimate
         -> update_critic -> update_actor -> sync_weights -> record
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from torch import Tensor
from torch.utils.data import Subset

from lockstep.algorithms.kl import make_kl_controller
from lockstep.config.follow import for_rows
from lockstep.config.load import as_config, fitted
from lockstep.config.ppo import PPOConfig, describe
from lockstep.data.row_files import describe_data, warn_of_other_data
from lockstep.data.schedule import PromptSchedule
from lockstep.models.hf_config import stop_token_ids
from lockstep.observability.display import make_display
from lockstep.observability.trackers import check_trackers
from lockstep.protocol import DataProto
from lockstep.single_controller.base import WorkerGroup, share_rows
from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.trainer.ppo import checks, recording, stages
from lockstep.trainer.ppo.algorithm import Estimation, PolicyUpdate, correction_of, reads_rewards
from lockstep.trainer.ppo.episodes import episode_metrics, episode_prompt, episode_rewards, episode_rollout
from lockstep.trainer.ppo.interfaces import Actor, Critic, Reference, RewardFunction, RewardModel, Rollout, RolloutWorkers
from lockstep.trainer.ppo.metrics import balance_metrics, data_metrics, peak_metrics, silent_peaks, timing_metrics
from lockstep.trainer.ppo.passes import Drift, Passes, Source
from lockstep.trainer.ppo.prompts import Groups, Prompts, open_dataset
from lockstep.trainer.ppo.rewards import Scored, Scorer, ScoreStage, greedy_baseline, judge_of
from lockstep.trainer.ppo.roles import learns_values, role_specs, weight_exchange
from lockstep.trainer.ppo.samples import SampleKeeper, choose_samples, share_with_signal, write_samples
from lockstep.trainer.ppo.validation import validate
from lockstep.trainer.role import Role
from lockstep.trainer.run.launch import ResourcePoolManager, Workers
from lockstep.trainer.run.loop import FitResult, Run
from lockstep.utils.device import resolve_device

if TYPE_CHECKING:
    from lockstep.trainer.ppo.journal import Journal

__all__ = ["FitResult", "RayPPOTrainer", "ResourcePoolManager", "Role"]

P = ParamSpec("P")


class RayPPOTrainer(Run):
    """Trains a policy with PPO or a relative of it on worker groups of any kind.

    The constructor checks everything that can be checked without a model: config, data, rewards, roles. `init_workers` starts the
    processes and loads the models. `fit` trains. After `init_workers` the groups are `actor_wg`, `rollout_wg`, `critic_wg`,
    `ref_policy_wg`, `rm_wg` (None if the run has none), and all of them are in `worker_groups` by role.
    """

    config: PPOConfig

    def __init__(
        self,
        config: PPOConfig | Mapping[str, Any],
        tokenizer: Any,
        role_worker_mapping: Mapping[Enum, type],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type[WorkerGroup] = RayWorkerGroup,
        reward_fn: RewardFunction | None = None,
        val_reward_fn: RewardFunction | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
    ) -> None:
        config = as_config(config)
        self.device = resolve_device(config.trainer.device)
        config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, device=self.device))
        self.tokenizer = tokenizer
        self.role_worker_mapping = checks.needed_roles(config, role_worker_mapping)
        self.resource_pool_manager = resource_pool_manager
        check_trackers(config.trainer.logger)
        checks.check_algorithm(config)
        checks.check_roles(config, self.role_worker_mapping, resource_pool_manager.mapping)
        checks.check_models(config, tokenizer)

        config = self._open_data(config, train_dataset, val_dataset)
        self._take_rewards(config, reward_fn, val_reward_fn)
        schedule = PromptSchedule(len(self.train_dataset), config.data.train_batch_size, config.data.shuffle, config.data_seed)
        total_steps = config.trainer.total_training_steps or schedule.steps_per_epoch * config.trainer.total_epochs
        super().__init__(config, total_steps, make_display(), has_validation=self.val_dataset is not None)

        self._bind_generation(schedule)
        self._bind_algorithm()
        self.workers = Workers(config.trainer, resource_pool_manager, ray_worker_group_cls, self.display.message)
        self.worker_groups = self.workers.by_role
        self.keeper = SampleKeeper(config.trainer.run_dir, config.trainer.report_rows, tokenizer)
        self._step_metrics: dict[str, float] = {}
        self._last: tuple[DataProto, Scored] | None = None
        """The batch of the last step, until `_examine` has shown it."""
        self._initial = self._state()

    def _open_data(self, config: PPOConfig, train_dataset: Any, val_dataset: Any) -> PPOConfig:
        """Open the files of data that was not given. Return the config with its numbers fitted to the number of prompts."""
        data = config.data
        if train_dataset is None:
            prompt = episode_prompt(config, data.train_files)
            train_dataset = open_dataset(config, self.tokenizer, data.train_files, data.train_max_samples, prompt)
        config = fitted(config, for_rows(config, len(train_dataset)), f"the data has {len(train_dataset)} prompts")
        data = config.data
        if val_dataset is None and data.val_files:
            prompt = episode_prompt(config, data.val_files)
            val_dataset = open_dataset(config, self.tokenizer, data.val_files, data.val_max_samples, prompt)
        config.trainer.check_validated(val_dataset is not None)
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        return config

    def _take_rewards(self, config: PPOConfig, reward_fn: RewardFunction | None, val_reward_fn: RewardFunction | None) -> None:
        """Check the reward functions with the data that they will judge."""
        datasets = (self.train_dataset, self.val_dataset)
        reward_fn, val_reward_fn = episode_rewards(config, datasets, reward_fn, val_reward_fn)
        checks.check_columns(config.data, *datasets)
        self.reward_fn = checks.check_rewards(config, reward_fn, val_reward_fn, *datasets)
        self.val_reward_fn = val_reward_fn
        self.data_description = describe_data(config.data, len(self.train_dataset))

    def _bind_generation(self, schedule: PromptSchedule) -> None:
        """Prompts, groups and sampling parameters of the steps."""
        config = self.config
        num_samples = config.actor_rollout_ref.rollout.n
        self.prompts = Prompts(self.train_dataset, schedule, num_samples, self.tokenizer.pad_token_id, self.left_out)
        self.new_groups = partial(
            Groups, config.algorithm.filter_groups, config.data.train_batch_size, num_samples, schedule.steps_per_epoch
        )
        stop_ids = stop_token_ids(str(config.actor_rollout_ref.model.path), self.tokenizer)
        self.sampling = config.sampling(stop_ids)
        self.val_sampling = config.sampling(stop_ids, validation=True)
        self.plays_episodes = config.agent.is_on

    def _bind_algorithm(self) -> None:
        """The functions of the algorithm with their numbers, and what they remember between steps."""
        config = self.config
        algorithm = config.algorithm
        policy = config.actor_rollout_ref
        kl = algorithm.kl_ctrl
        self.drift = Drift(config, self.display.message)
        self.kl_control = make_kl_controller(kl.type, kl.kl_coef, kl.target_kl, kl.horizon)
        self.correction = correction_of(algorithm.rollout_correction)
        self.estimation = Estimation.of(algorithm)
        self.needs_baseline = self.estimation.estimator.columns.get("reward_baselines", False)
        self.policy_update = PolicyUpdate.of(policy.actor, balances=policy.model.router_aux_loss_coef > 0)
        self.actor_prompts = config.actor_mini_batch_prompts
        self.critic_prompts = config.critic_mini_batch_prompts
        self.values_in_update = config.values_in_update and learns_values(self.role_worker_mapping)
        self.alarms.ignored = () if reads_rewards(algorithm) else ("equal_rewards", "silent_groups")

    def init_workers(self) -> None:
        """Take the run's folder, check the resources, start a process per slot of the pools, load every role's model. If this fails, no
        process is left."""
        self.open_folder()
        workers = self.workers
        workers.recall(self._from)
        workers.start(role_specs(self.config, self.role_worker_mapping, self.total_steps, self.tokenizer.pad_token_id))
        self.actor_wg = cast("Actor", workers.find("ActorRolloutRef", "ActorRollout", "Actor"))
        self.actor_rollout_wg = self.actor_wg
        self.rollout_wg = workers.find("ActorRolloutRef", "ActorRollout", "Rollout")
        self.critic_wg = cast("Critic | None", workers.find("Critic"))
        self.ref_policy_wg: Reference | None = None
        if self.config.use_reference:
            self.ref_policy_wg = cast("Reference", workers.find("RefPolicy", "ActorRolloutRef"))
        self.rm_wg = cast("RewardModel | None", workers.find("RewardModel"))
        self.num_gpus = self.resource_pool_manager.get_n_gpus()
        self.weight_exchange = weight_exchange(workers, self.config)
        if self.config.actor_rollout_ref.model.lora_adapter_path is not None:  # a separate rollout has loaded no adapter
            stages.sync_weights(self.weight_exchange)
        self._connect()

    def _connect(self) -> None:
        """The generator and the scorer of the steps, over the workers."""
        rollout = self.rollout_wg
        self.rollout: Rollout = episode_rollout(self.config, rollout) if self.plays_episodes else RolloutWorkers(rollout)
        self.generator = self.rollout
        self.scorer: ScoreStage = Scorer.of(self.reward_fn, self.rm_wg, self.tokenizer, self.config)
        self.journal: Journal | None = None
        if self.config.trainer.max_restarts:
            from lockstep.trainer.ppo.journal import Journal, JournaledRollout, JournaledScorer

            self.journal = Journal(self.config, lambda: self.actor_wg.weights_checksum(), self.display.message)
            self.generator = JournaledRollout(self.rollout, self.journal)
            self.scorer = JournaledScorer(self.scorer, self.journal, self.config.trainer.run_dir, self.tokenizer)
        self.greedy_baseline = partial(greedy_baseline, rollout=self.generator, sampling=self.sampling, scorer=self.scorer)

    def close(self) -> None:
        """End the worker processes and the processes of the rewards, and let other runs have the folder."""
        self.close_folder()
        self.workers.close()
        for reward_fn in (self.reward_fn, self.val_reward_fn):
            if reward_fn is not None and hasattr(reward_fn, "close"):
                reward_fn.close()

    # -- the step ----------------------------------------------------------------------------------------------------------

    def _step(self) -> dict[str, float]:
        """One batch of prompts, from generation to the updates."""
        step = self.global_steps + 1
        with self.timer.stage("step"):
            batch, scored = self._collect()
            actor, critic, reference = self.actor_wg, self.critic_wg, self.ref_policy_wg
            passes = self._passes(step, batch)
            if passes.old_log_probs is Source.SAMPLER:
                self._run(None, stages.use_sampler_log_probs, batch)
            if passes.old_log_probs is Source.PASS:
                self._run("old_log_prob", stages.old_log_prob, actor, batch, self.drift)
            if reference is not None:
                self._run("ref", stages.ref_log_prob, reference, batch)
            if critic is not None and not passes.learns_values:
                self._run("values", stages.values, critic, batch)
            if passes.is_recorded:
                self._run("record_batch", self._record_batch, step, batch, scored)
            self._run(None, stages.correct, batch, self.correction)
            self._run(None, stages.shape_rewards, batch, self.estimation, self.kl_control)
            if critic is not None and passes.learns_values:
                self._run("update_critic", stages.learn_values, critic, batch, self.estimation)
            self._run("adv", stages.estimate, batch, self.estimation)
            if critic is not None and not passes.learns_values:
                self._run("update_critic", stages.update_critic, critic, batch, passes.critic_updates)
            if passes.trains_actor:
                self._run("update_actor", stages.update_actor, actor, batch, passes.actor_updates, self.policy_update, self.drift)
                self._run("update_weights", stages.sync_weights, self.weight_exchange)
        return self._record(step, batch, scored, passes)

    def _run(self, span: str | None, stage: Callable[P, dict[str, float] | None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do a stage of the step. Its time becomes timing_s/{span}, its metrics join the step's."""
        with self.timer.stage(span) if span is not None else nullcontext():
            metrics = stage(*args, **kwargs)
        self._step_metrics |= metrics or {}

    def _collect(self) -> tuple[DataProto, Scored]:
        """Generate and score until the step has its groups: once, unless algorithm.filter_groups drops some."""
        timer = self.timer
        groups = self.new_groups()
        while not groups.are_complete:
            batch, number = self.prompts.next()
            scoring = self.scorer.begin(batch)
            with timer.stage("gen"):
                stages.generate(self.generator, batch, self.sampling, number, scoring)
            with timer.stage("reward"):
                scored, metrics = self.scorer.score(batch, number, scoring)
            if self.needs_baseline:
                with timer.stage("gen_max"):
                    metrics |= self.greedy_baseline(batch, number)
            groups.add(batch, scored, metrics)
        batch, scored, self._step_metrics = groups.join(self.display.message)
        return batch, scored

    def _passes(self, step: int, batch: DataProto) -> Passes:
        """Decide which passes and updates the step makes."""
        trainer = self.config.trainer
        actor_updates = self._mini_batches(step, batch, self.actor_prompts, self.config.actor_rollout_ref.actor.ppo_epochs)
        is_recorded = trainer.record_batch_dir is not None and self.is_due(trainer.record_batch_freq, step)
        learns_values = self.values_in_update and not is_recorded
        updates_critic = self.critic_wg is not None and not learns_values
        return Passes(
            old_log_probs=self.drift.source(step, len(actor_updates), is_recorded),
            learns_values=learns_values,
            critic_updates=self._mini_batches(step, batch, self.critic_prompts, self.config.critic_epochs)
            if updates_critic
            else [],
            actor_updates=actor_updates,
            trains_actor=step > trainer.critic_warmup,
            is_recorded=is_recorded,
        )

    def _mini_batches(self, step: int, batch: DataProto, num_prompts: int, epochs: int) -> list[Tensor]:
        """Return the row numbers of each update."""
        n = self.config.actor_rollout_ref.rollout.n
        seed = self.config.trainer.seed + step if self.config.actor_rollout_ref.actor.shuffle else None
        return stages.cut_mini_batches(len(batch) // n, n, num_prompts, epochs, seed)

    def _record_batch(self, step: int, batch: DataProto, scored: Scored) -> None:
        """Save the batch for `lockstep compare`. The run's own batch stays as it is."""
        recorded = batch.select()
        if "reward_baselines" not in recorded:
            baseline = partial(self.greedy_baseline, number=self.prompts.number)
            recording.add_baselines(recorded, step, baseline, self.display.message)
        kl_coef = self.kl_control.value
        folder = recording.record(recorded, scored, self.config, step, kl_coef, self.actor_wg, self.tokenizer)
        self.display.message(f"the batch of step {step} is in {folder}")

    def _record(self, step: int, batch: DataProto, scored: Scored, passes: Passes) -> dict[str, float]:
        """Return the metrics of the step. Write its samples to trainer.rollout_data_dir."""
        data = self.config.data
        folder = self.config.trainer.rollout_data_dir
        self._last = batch, scored
        if folder is not None:
            write_samples(folder, step, batch, scored.extra, self.tokenizer, scored.failures)
        metrics = self._step_metrics | self._peaks(passes)
        metrics |= peak_metrics(metrics)
        metrics |= data_metrics(batch, data.max_response_length, data.max_prompt_length, judged=self.reward_fn is not None)
        metrics |= balance_metrics(batch.token_counts(), share_rows(batch, self.actor_wg.world_size), "global_seqlen")
        metrics |= timing_metrics(batch, self.timer.seconds, self.num_gpus)
        if self.plays_episodes:
            metrics |= episode_metrics(batch)
        return metrics | {"training/global_step": step, "training/epoch": self.prompts.epoch}

    def _peaks(self, passes: Passes) -> dict[str, float]:
        """Return peaks of memory of the groups that have made no update, which would have reported them."""
        groups = [self.rollout_wg, self.ref_policy_wg, self.rm_wg]
        if passes.trains_actor:
            groups = [group for group in groups if group is not self.actor_wg]
        return silent_peaks(groups)

    def _examine(self, metrics: dict[str, float]) -> list[dict[str, Any]]:
        assert self._last is not None
        batch, scored = self._last
        self._last = None
        log_probs = self.actor_wg.compute_log_prob if self.config.trainer.report_ratio else None
        self.keeper.keep(f"train_{self.global_steps}", batch, scored, log_probs)
        n = self.config.actor_rollout_ref.rollout.n
        if n > 1 and self.reward_fn is not None:
            metrics.setdefault("training/groups_with_signal", share_with_signal(scored, n))
        return choose_samples(batch, scored, self.tokenizer)

    # -- around the steps --------------------------------------------------------------------------------------------------

    def _describe(self) -> str:
        return describe(self.config, len(self.train_dataset), self.total_steps, self.device)

    def _validate(self) -> dict[str, float]:
        """Generate on the validation prompts with rollout.val_kwargs and score them."""
        config = self.config
        rollout = config.actor_rollout_ref.rollout
        assert self.val_reward_fn is not None
        reward_model = self.rm_wg if checks.asks_model(config, self.val_reward_fn) else None
        count = len(self.val_dataset)
        rows = self._validated_rows("val_files", count, rollout.val_kwargs.n, config.data.train_batch_size * rollout.n)
        dataset: Any = Subset(self.val_dataset, rows)
        return validate(
            dataset,
            self.rollout,
            self.val_sampling,
            judge_of(self.val_reward_fn, reward_model, self.tokenizer, config),
            self.global_steps,
            n=rollout.val_kwargs.n,
            batch_size=config.data.val_batch_size,
            folder=config.trainer.validation_data_dir,
            keeper=self.keeper,
            first=self._first_rows("val_files", count),
        )

    def training_data(self) -> tuple[Any, PromptSchedule]:
        """See Run."""
        return self.train_dataset, self.prompts.schedule

    def _position(self) -> int:
        return self.prompts.num_taken

    def _after_step(self, metrics: dict[str, float], *around: Any) -> None:
        super()._after_step(metrics, *around)
        if self.journal is not None:
            self.journal.clear(self.prompts.number)

    # -- checkpoints and restarts ------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "num_prompt_batches": self.prompts.num_taken,
            "kl_control": self.kl_control.state_dict(),
            "sampler_drift": self.drift.largest,
            "numbers": self.workers.numbers,
            **self.data_description,
        }

    def _save(self, folder: Path) -> list[Path]:
        in_background = self.config.trainer.save_in_background
        reports = self.actor_wg.begin_checkpoint(str(folder / "actor"), in_background)
        if self.critic_wg is not None:
            reports += self.critic_wg.begin_checkpoint(str(folder / "critic"), in_background)
        self.tokenizer.save_pretrained(folder / "actor")
        return [Path(report) for report in reports]

    def _finish_save(self) -> list[str]:
        errors = self.actor_wg.finish_checkpoint()
        if self.critic_wg is not None:
            errors += self.critic_wg.finish_checkpoint()
        return [error for error in errors if error is not None]

    def _load(self, folder: Path, state: dict[str, Any]) -> None:
        warn_of_other_data(state, self.data_description, self.display.message)
        self.actor_wg.load_checkpoint(str(folder / "actor"))
        if self.critic_wg is not None:
            self.critic_wg.load_checkpoint(str(folder / "critic"))
        self._restore(state)
        stages.sync_weights(self.weight_exchange)

    def _restore(self, state: dict[str, Any]) -> None:
        self.prompts.num_taken = state["num_prompt_batches"]
        self.drift.largest = state["sampler_drift"]
        self.kl_control.load_state_dict(state["kl_control"])

    def _restart(self) -> None:
        self.workers.close()
        self._restore(self._initial)
        self.init_workers()
