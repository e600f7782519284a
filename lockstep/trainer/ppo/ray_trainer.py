"""RayPPOTrainer: one driver, groups of workers, and the step of PPO and its relatives. `_step` reads as the algorithm:

```text
generate -> score -> old_log_prob -> ref_log_prob -> values -> correct -> shape_rewards -> estimate
         -> update_critic -> update_actor -> sync_weights -> record
```
"""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from lockstep.algorithms.kl import make_kl_controller
from lockstep.config.arithmetic import describe
from lockstep.config.follow import for_rows
from lockstep.config.load import as_config, fitted
from lockstep.config.ppo import PPOConfig
from lockstep.data.row_files import describe_data
from lockstep.data.schedule import PromptSchedule
from lockstep.models.hf_config import stop_token_ids
from lockstep.observability.display import make_display
from lockstep.observability.trackers import check_trackers
from lockstep.protocol import DataProto
from lockstep.single_controller.base import WorkerGroup, share_rows
from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.trainer.ppo import checks, critic_stages, recording, stages
from lockstep.trainer.ppo.drift import Drift, Source
from lockstep.trainer.ppo.episodes import episode_metrics, episode_prompt, episode_rewards, episode_rollout
from lockstep.trainer.ppo.groups import Groups
from lockstep.trainer.ppo.kept_samples import SampleKeeper
from lockstep.trainer.ppo.metrics import balance_metrics, data_metrics, peak_metrics, silent_peaks, timing_metrics
from lockstep.trainer.ppo.prompts import Prompts, open_dataset
from lockstep.trainer.ppo.resolved import Estimation, PolicyUpdate, read_correction, reads_rewards
from lockstep.trainer.ppo.reward_columns import greedy_baseline
from lockstep.trainer.ppo.rewards import Scorer
from lockstep.trainer.ppo.roles import learns_values, role_specs, weight_exchange
from lockstep.trainer.ppo.samples import choose_samples, share_with_signal, write_samples
from lockstep.trainer.ppo.saved import SavedPPO
from lockstep.trainer.ppo.scored import Scored
from lockstep.trainer.ppo.validation import validate
from lockstep.trainer.role import Role
from lockstep.trainer.run.launch import Workers
from lockstep.trainer.run.loop import FitResult
from lockstep.trainer.run.resources import ResourcePoolManager
from lockstep.utils.device import resolve_device

__all__ = ["FitResult", "RayPPOTrainer", "ResourcePoolManager", "Role"]


class RayPPOTrainer(SavedPPO):
    """Trains a policy with PPO or a relative of it on worker groups of any kind.

    The constructor checks everything that can be checked without a model: config, data, rewards, roles. `init_workers` starts the
    processes and loads the models. `fit` trains. After `init_workers` the groups are `actor_wg`, `rollout_wg`, `critic_wg`,
    `ref_policy_wg`, `rm_wg` (None where the run has none), and all of them are in `worker_groups` by role.
    """

    config: PPOConfig
    _trained: tuple[DataProto, Scored]

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
        config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, device=self.device))
        self.tokenizer = tokenizer
        self.role_worker_mapping = checks.needed_roles(config, role_worker_mapping)
        self.resource_pool_manager = resource_pool_manager
        check_trackers(config.trainer.logger)
        checks.check_algorithm(config)
        checks.check_roles(config, self.role_worker_mapping, resource_pool_manager.mapping)
        checks.check_models(config, tokenizer)

        data, algorithm = config.data, config.algorithm
        if train_dataset is None:
            train_dataset = open_dataset(
                config, tokenizer, data.train_files, data.train_max_samples, episode_prompt(config, data.train_files)
            )
        config = fitted(config, for_rows(config, len(train_dataset)), f"the data has {len(train_dataset)} prompts")
        data = config.data
        if val_dataset is None and data.val_files:
            val_dataset = open_dataset(
                config, tokenizer, data.val_files, data.val_max_samples, episode_prompt(config, data.val_files)
            )
        config.trainer.check_validated(val_dataset is not None)
        reward_fn, val_reward_fn = episode_rewards(config, (train_dataset, val_dataset), reward_fn, val_reward_fn)
        checks.check_columns(data, train_dataset, val_dataset)
        self.reward_fn = checks.check_rewards(config, reward_fn, val_reward_fn, train_dataset, val_dataset)
        self.val_reward_fn = val_reward_fn
        self.train_dataset, self.val_dataset, self.describe_data = train_dataset, val_dataset, describe_data(data, len(train_dataset))
        schedule = PromptSchedule(len(train_dataset), data.train_batch_size, data.shuffle, config.data_seed)
        total_steps = config.trainer.total_training_steps or schedule.steps_per_epoch * config.trainer.total_epochs
        super().__init__(config, total_steps, make_display(), has_validation=val_dataset is not None)

        self.prompts = Prompts(train_dataset, schedule, config.actor_rollout_ref.rollout.n, tokenizer.pad_token_id, self.left_out)
        self.new_groups = partial(
            Groups, algorithm.filter_groups, data.train_batch_size, config.actor_rollout_ref.rollout.n, schedule.steps_per_epoch
        )
        stop_ids = stop_token_ids(str(config.actor_rollout_ref.model.path), tokenizer)
        self.sampling, self.val_sampling = config.sampling(stop_ids), config.sampling(stop_ids, validation=True)
        self.drift = Drift(config, self.display.message)
        kl = algorithm.kl_ctrl
        self.kl_control = make_kl_controller(kl.type, kl.kl_coef, kl.target_kl, kl.horizon)
        policy, self.plays_episodes = config.actor_rollout_ref, config.agent.is_on
        self.policy_update = PolicyUpdate.of(policy.actor, balances=policy.model.router_aux_loss_coef > 0)
        self.estimation = Estimation.of(algorithm)
        self.values_in_update = config.values_in_update and learns_values(self.role_worker_mapping)
        self.correction = read_correction(algorithm.rollout_correction)
        self.actor_prompts, self.critic_prompts = config.actor_mini_batch_prompts, config.critic_mini_batch_prompts
        self.needs_baseline = self.estimation.estimator.columns.get("reward_baselines", False)
        self.workers = Workers(config.trainer, resource_pool_manager, ray_worker_group_cls, self.display.message)
        self.worker_groups = self.workers.by_role
        self.keeper = SampleKeeper(config.trainer.run_dir, config.trainer.report_rows, tokenizer)
        self._last: Any = None
        self.alarms.ignored = () if reads_rewards(algorithm) else ("equal_rewards", "silent_groups")
        self._initial = self._state()

    def init_workers(self) -> None:
        """Take the run's folder, check the resources, start a process per slot of the pools, load every role's model. No process is left
        when this fails."""
        self.open_folder()
        workers = self.workers
        workers.recall(self._from)
        workers.start(role_specs(self.config, self.role_worker_mapping, self.total_steps, self.tokenizer.pad_token_id))
        self.actor_wg: Any = workers.find("ActorRolloutRef", "ActorRollout", "Actor")
        self.actor_rollout_wg = self.actor_wg
        self.rollout_wg: Any = workers.find("ActorRolloutRef", "ActorRollout", "Rollout")
        if self.plays_episodes:
            self.rollout_wg = episode_rollout(self.config, self.rollout_wg)
        self.critic_wg: Any = workers.find("Critic")
        self.ref_policy_wg: Any = workers.find("RefPolicy", "ActorRolloutRef") if self.config.use_reference else None
        self.rm_wg: Any = workers.find("RewardModel")
        self.weight_exchange, self.num_gpus = weight_exchange(workers, self.config), self.resource_pool_manager.get_n_gpus()
        if self.config.actor_rollout_ref.model.lora_adapter_path is not None:  # a rollout of its own has loaded no adapter
            stages.sync_weights(self.weight_exchange)
        self.generator, self.scorer = self.rollout_wg, Scorer.of(self.reward_fn, self.rm_wg, self.tokenizer, self.config)
        if self.config.trainer.max_restarts:
            from lockstep.trainer.ppo.journal import Journal, journaled

            self.journal = Journal(self.config, lambda: self.actor_wg.weights_checksum(), self.display.message)
            self.generator, self.scorer = journaled(self.generator, self.scorer, self.journal)
        self.greedy_baseline = partial(greedy_baseline, rollout=self.generator, sampling=self.sampling, scorer=self.scorer)

    def close(self) -> None:
        """End the worker processes, and those of the rewards, and let other runs have the folder."""
        self.close_folder()
        self.workers.close()
        for reward_fn in (self.reward_fn, self.val_reward_fn):
            if hasattr(reward_fn, "close"):
                reward_fn.close()

    # -- the step ----------------------------------------------------------------------------------------------------------

    def _step(self) -> dict[str, float]:
        """One batch of prompts, from generation to the updates."""
        step, config, timer = self.global_steps + 1, self.config, self.timer
        with timer.stage("step"):
            groups = self.new_groups()
            while not groups.are_complete:  # once, unless algorithm.filter_groups drops some
                batch, number = self.prompts.next()
                scoring = self.scorer.begin(batch)
                with timer.stage("gen"):
                    stages.generate(self.generator, batch, self.sampling, number, getattr(scoring, "add", None))
                with timer.stage("reward"):
                    scored, found = self.scorer.score(batch, number, scoring)
                if self.needs_baseline:
                    with timer.stage("gen_max"):
                        found |= self.greedy_baseline(batch, number)
                groups.add(batch, scored, found)
            batch, scored, metrics = groups.join(self.display.message)

            updates = self._mini_batches(step, batch, self.actor_prompts, config.actor_rollout_ref.actor.ppo_epochs)
            is_recorded = self._is_recorded(step)
            source = self.drift.source(step, len(updates), is_recorded)
            if source is Source.SAMPLER:
                stages.use_sampler_log_probs(batch)
            elif source is Source.PASS:
                with timer.stage("old_log_prob"):
                    metrics |= stages.old_log_prob(self.actor_wg, batch)
                self.drift.heed(source, metrics.get("training/rollout_log_probs_diff_max"))
            if self.ref_policy_wg is not None:
                with timer.stage("ref"):
                    stages.ref_log_prob(self.ref_policy_wg, batch)
            values_are_learned = self.values_in_update and not is_recorded
            if self.critic_wg is not None and not values_are_learned:
                with timer.stage("values"):
                    critic_stages.values(self.critic_wg, batch)
            if is_recorded:
                with timer.stage("record_batch"):
                    recording.record_step(self, step, batch, scored)
            metrics |= stages.correct(batch, self.correction) | stages.shape_rewards(batch, self.estimation, self.kl_control)
            if values_are_learned:
                with timer.stage("update_critic"):
                    metrics |= critic_stages.learn_values(self.critic_wg, batch, self.estimation)
            with timer.stage("adv"):
                stages.estimate(batch, self.estimation)
            if self.critic_wg is not None and not values_are_learned:
                with timer.stage("update_critic"):
                    rows = self._mini_batches(step, batch, self.critic_prompts, config.critic_epochs)
                    metrics |= critic_stages.update_critic(self.critic_wg, batch, rows)
            if step > config.trainer.critic_warmup:
                with timer.stage("update_actor"):
                    update_metrics, difference = stages.update_actor(self.actor_wg, batch, updates, self.policy_update)
                metrics |= update_metrics
                if source is not Source.PASS:
                    self.drift.heed(source, difference)
                with timer.stage("update_weights"):
                    stages.sync_weights(self.weight_exchange)
        told = (self.actor_wg,) if step > config.trainer.critic_warmup else ()
        metrics |= silent_peaks(group for group in (self.rollout_wg, self.ref_policy_wg, self.rm_wg) if group not in told)
        return metrics | peak_metrics(metrics) | self._record(step, batch, scored)

    def _mini_batches(self, step: int, batch: DataProto, num_prompts: int, epochs: int) -> list[Tensor]:
        """Row numbers of each update."""
        n = self.config.actor_rollout_ref.rollout.n
        seed = self.config.trainer.seed + step if self.config.actor_rollout_ref.actor.shuffle else None
        return stages.cut_mini_batches(len(batch) // n, n, num_prompts, epochs, seed)

    def _record(self, step: int, batch: DataProto, scored: Scored) -> dict[str, float]:
        """Numbers about the batch and the time it took. Writes its samples where trainer.rollout_data_dir says."""
        data, folder = self.config.data, self.config.trainer.rollout_data_dir
        self._last = batch, scored
        if folder is not None:
            write_samples(folder, step, batch, scored.extra, self.tokenizer, scored.failures)
        metrics = data_metrics(batch, data.max_response_length, data.max_prompt_length, judged=self.reward_fn is not None)
        metrics |= balance_metrics(batch.token_counts(), share_rows(batch, self.actor_wg.world_size), "global_seqlen")
        metrics |= timing_metrics(batch, self.timer.seconds, self.num_gpus)
        if self.plays_episodes:
            metrics |= episode_metrics(batch)
        return metrics | {"training/global_step": step, "training/epoch": self.prompts.epoch}

    def _examine(self, metrics: dict[str, float]) -> list[dict[str, Any]]:
        (batch, scored), self._last = self._last, None
        log_probs = self.actor_wg.compute_log_prob if self.config.trainer.report_ratio else None
        self.keeper.keep(f"train_{self.global_steps}", batch, scored, log_probs)
        if (n := self.config.actor_rollout_ref.rollout.n) > 1 and self.reward_fn is not None:
            metrics.setdefault("training/groups_with_signal", share_with_signal(scored, n))
        return choose_samples(batch, scored, self.tokenizer)

    def _is_recorded(self, step: int) -> bool:
        trainer = self.config.trainer
        return trainer.record_batch_dir is not None and self.is_due(trainer.record_batch_freq, step)

    # -- what the run asks for ---------------------------------------------------------------------------------------------

    def _describe(self) -> str:
        return describe(self.config, len(self.train_dataset), self.total_steps, self.device)

    def _validate(self) -> dict[str, float]:
        """Generate on the validation prompts with rollout.val_kwargs and score them."""
        config, asks_model = self.config, checks.asks_model(self.config, self.val_reward_fn)
        judge = Scorer.of(self.val_reward_fn, self.rm_wg if asks_model else None, self.tokenizer, config)
        n, size = config.actor_rollout_ref.rollout.val_kwargs.n, config.data.val_batch_size
        options: Any = {"n": n, "batch_size": size, "folder": config.trainer.validation_data_dir, "keeper": self.keeper}
        per_step = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        count = len(self.val_dataset)
        dataset: Any = Subset(self.val_dataset, self._validated_rows("val_files", count, n, per_step))
        options["first"] = self._first_rows("val_files", count)
        return validate(dataset, self.rollout_wg, self.val_sampling, judge, self.global_steps, **options)

    def training_data(self) -> tuple[Any, PromptSchedule]:
        """See Run."""
        return self.train_dataset, self.prompts.schedule
