"""BatchMaker: from prompts to the scored responses of one step.

```text
next prompts -> generate -> score -> (greedy baseline) -> (drop groups without a signal, take more prompts) -> batch
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lockstep.algorithms.advantages import required_inputs
from lockstep.config.ppo import PPOConfig
from lockstep.config.sampling import SamplingParams
from lockstep.data.schedule import PromptSchedule
from lockstep.errors import RewardError
from lockstep.observability.spans import StageTimer
from lockstep.protocol import DataProto
from lockstep.trainer.ppo import rewards, stages
from lockstep.trainer.ppo.rewards import Scored
from lockstep.utils.files import load_reference

ScoredBatch = tuple[DataProto, Scored, dict[str, float]]
"""Rows with token_level_scores, what else the judges said of them, and metrics."""


class BatchMaker:
    """Takes prompts in the order of the schedule and makes one scored batch a step of them. `say` tells the user something."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        dataset: Any,
        schedule: PromptSchedule,
        reward_fn: Any,
        timer: StageTimer,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._tokenizer, self._dataset, self._schedule = config, tokenizer, dataset, schedule
        self._reward_fn, self._timer, self._say = reward_fn, timer, say
        estimator = config.algorithm.adv_estimator
        self._needs_baseline = "reward_baselines" in required_inputs(load_reference(estimator) or estimator)
        self.num_taken = 0
        """Batches of prompts taken so far: one a step, more with algorithm.filter_groups. All there is to save for a resume."""

    def next(self, rollout: Any, reward_model: Any, sampling: SamplingParams) -> ScoredBatch:
        """The batch of the next step, from worker groups `rollout` and `reward_model` (or None).

        With algorithm.filter_groups: as many batches of prompts as it takes to fill the step with groups that have a signal.
        """
        config = self._config.algorithm.filter_groups
        if not config.enable:
            return self._one_batch(rollout, reward_model, sampling)
        kept: list[DataProto] = []
        kept_scored: list[Scored] = []
        groups = tried = 0
        metrics: dict[str, float] = {}
        wanted, n = self._config.data.train_batch_size, self._config.actor_rollout_ref.rollout.n
        while groups < wanted and (tried < config.max_num_gen_batches or not config.max_num_gen_batches):
            batch, scored, metrics = self._one_batch(rollout, reward_model, sampling)
            tried += 1
            rows = rewards.rows_with_signal(batch, scored, config.metric)[: (wanted - groups) * n]
            if len(rows):
                kept.append(batch.select_idxs(rows))
                kept_scored.append(scored.select(rows.tolist()))
                groups += len(rows) // n
        if not kept:
            raise RewardError(
                f"{tried} batches of prompts gave no group whose responses differ in {config.metric!r}, so there is nothing to learn "
                "from: the task is too hard or too easy for this model, or its reward is constant (lockstep rewards check); "
                "algorithm.filter_groups.max_num_gen_batches limits the search"
            )
        if groups < wanted:
            self._say(f"{groups} of {wanted} groups have a signal after {tried} batches of prompts; the step goes on with these")
        metrics |= {"training/num_gen_batches": tried, "training/groups_with_signal": groups / (tried * wanted)}
        return DataProto.concat(kept), Scored.concat(kept_scored), metrics

    def _one_batch(self, rollout: Any, reward_model: Any, sampling: SamplingParams) -> ScoredBatch:
        """Responses to the next batch of prompts, with their scores. Scoring starts when the first response is there."""
        self.num_taken += 1
        positions, n = self._schedule.batch(self.num_taken - 1), self._config.actor_rollout_ref.rollout.n
        batch = stages.make_prompts(self._dataset, positions, n, self._tokenizer.pad_token_id)
        batch.non_tensor_batch["uid"] = np.array([f"{self.num_taken}.{uid}" for uid in batch.non_tensor_batch["uid"]], dtype=object)
        scoring = self._reward_fn.begin(batch) if hasattr(self._reward_fn, "begin") else None
        with self._timer.stage("gen"):
            # In the sampling key the number of the batch stands for the step: a prompt may come twice in a step, but never in a batch.
            stages.generate(rollout, batch, sampling, self.num_taken, scoring.add if scoring is not None else None)
        with self._timer.stage("reward"):
            scored = self._score(batch, reward_model, scoring)
            metrics = rewards.reward_metrics(scored) | self._penalise_overlong(batch)
            if keys := self._config.algorithm.gdpo_reward_keys:
                rewards.set_parts(batch, scored, keys)
        if self._needs_baseline:
            with self._timer.stage("gen_max"):
                metrics |= self.add_baselines(batch, rollout, reward_model, sampling)
        return batch, scored, metrics

    def add_baselines(self, batch: DataProto, rollout: Any, reward_model: Any, sampling: SamplingParams) -> dict[str, float]:
        """Writes reward_baselines: the score of the greedy response to each prompt of the last batch."""
        first = torch.tensor([sample == 0 for sample in batch.non_tensor_batch["sample"]])
        objects = [name for name in batch.non_tensor_batch if name != "finish_reason"]
        greedy = batch.select(["prompts"], objects).select_idxs(first)
        stages.generate(rollout, greedy, dataclasses.replace(sampling, temperature=0.0), self.num_taken)
        scored = self._score(greedy, reward_model)
        self._penalise_overlong(greedy)
        missing = rewards.baselines(batch, greedy, scored)
        return {"reward/baseline/mean": sum(scored.total) / len(scored.total), "reward/baseline/missing": float(missing)}

    def _score(self, batch: DataProto, reward_model: Any, scoring: Any = None) -> Scored:
        if reward_model is not None:
            rewards.model_scores(reward_model, self._reward_fn, batch, self._tokenizer)
        scored = rewards.score(self._reward_fn, batch, self._config.reward.max_failure_rate, scoring)
        rewards.record_failures(self._config.trainer.run_dir, self.num_taken, batch, scored, self._tokenizer)
        return scored

    def _penalise_overlong(self, batch: DataProto) -> dict[str, float]:
        return rewards.penalise_overlong(batch, self._config.reward.overlong_buffer, self._config.data.max_response_length)
