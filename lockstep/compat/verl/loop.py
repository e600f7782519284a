"""verl's trainer for a class that has its own `fit`: verl's attributes, and worker calls on whole batches, over Lockstep's trainer.

`class RayDAPOTrainer(RayPPOTrainer)` with a `fit` gets `VerlTrainer` as its base (`adopt`); a class without one stays Lockstep's. The
stages are those of `trainer.ppo.stages`; the order, the metrics and when to save are what the class's `fit` says.
"""

import atexit
import dataclasses
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from lockstep.compat.verl import functions
from lockstep.compat.verl.runner import our_config
from lockstep.data.schedule import PromptSchedule
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base import ClassWithInitArgs, share_rows
from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.trainer.ppo import stages
from lockstep.trainer.ppo.metrics import balance_metrics
from lockstep.trainer.ppo.ray_trainer import RayPPOTrainer
from lockstep.trainer.ppo.reward_columns import model_scores
from lockstep.trainer.ppo.samples import write_samples

_REWARD_COLUMNS = ("data_source", "reward_model", "extra_info", "uid", "raw_prompt")


def adopt(trainer_class: type) -> None:
    """Put VerlTrainer in the place of Lockstep's trainer under a new class that has its own `fit`."""
    if "fit" in vars(trainer_class):
        trainer_class.__bases__ = tuple(VerlTrainer if base is RayPPOTrainer else base for base in trainer_class.__bases__)


class VerlTrainer(ABC):  # noqa: B024 (the bases of a class are only exchanged for others like them)
    """The attributes and methods that verl's `fit` uses, over `inner`, which is Lockstep's trainer.

    `config` stays what it was given as, with verl's keys; `inner.config` is what they mean here (`lockstep verl-keys`).
    """

    async_rollout_mode, ref_in_actor, hybrid_engine = True, False, True

    def __init__(
        self, config: Any, tokenizer: Any, role_worker_mapping: Mapping[Enum, Any], resource_pool_manager: Any,
        ray_worker_group_cls: Any = RayWorkerGroup, processor: Any = None, reward_fn: Any = None, val_reward_fn: Any = None,
        train_dataset: Any = None, val_dataset: Any = None, collate_fn: Any = None, train_sampler: Any = None, device_name: Any = None,
    ) -> None:  # fmt: skip
        ours = our_config(config)
        self.config = config if isinstance(config, DictConfig) else OmegaConf.create(dataclasses.asdict(ours))
        self.tokenizer, self.resource_pool_manager, self._scores = tokenizer, resource_pool_manager, reward_fn is None
        roles = {role: ClassWithInitArgs(worker).cls for role, worker in role_worker_mapping.items()}
        self.reward_fn = reward_fn or functions.load_reward_manager(ours, tokenizer)
        self.val_reward_fn = val_reward_fn or functions.load_reward_manager(ours, tokenizer, num_examine=1)
        self.inner = RayPPOTrainer(
            ours, tokenizer, roles, resource_pool_manager, ray_worker_group_cls, self.reward_fn, self.val_reward_fn, train_dataset,
            val_dataset,
        )  # fmt: skip
        self.use_critic, self.use_rm, self.use_reference_policy = ours.use_critic, ours.reward_model.enable, ours.use_reference
        self.kl_ctrl_in_reward, self.train_dataset = self.inner.kl_control, self.inner.train_dataset
        size = OmegaConf.select(self.config, "data.gen_batch_size") or ours.data.train_batch_size
        self.train_dataloader = self._loader(size, train_sampler, collate_fn or functions.collate_fn)
        self.total_training_steps = ours.trainer.total_training_steps or len(self.train_dataloader) * ours.trainer.total_epochs
        self.inner.total_steps = self.total_training_steps

    def _loader(self, size: int, sampler: Any, collate_fn: Any) -> DataLoader[Any]:
        """Batches of prompts; in Lockstep's order, which goes on after a resume, unless the sampler is one of the class's own."""
        data, inner = self.inner.config.data, self.inner
        rows = _Rows(inner.train_dataset, self.tokenizer.pad_token_id, data.max_prompt_length)
        batches: Any = BatchSampler(sampler or (), size, drop_last=True)
        if type(sampler) in (type(None), RandomSampler, SequentialSampler):
            schedule = PromptSchedule(len(inner.train_dataset), size, data.shuffle, inner.config.data_seed)
            batches = _Epoch(schedule, inner.prompts)
        return DataLoader(rows, batch_sampler=batches, collate_fn=collate_fn)

    global_steps = property(lambda self: self.inner.global_steps, lambda self, step: setattr(self.inner, "global_steps", step))
    _start_profiling = _stop_profiling = functions.nothing

    def init_workers(self) -> None:
        """Start the workers and load the models. They end with the process."""
        inner = self.inner
        atexit.register(inner.close)
        inner.init_workers()
        self.actor_rollout_wg = self.actor_wg = self.async_rollout_manager = _Calls(self, inner.actor_wg)
        self.critic_wg, self.rm_wg, self.ref_policy_wg = (
            _Calls(self, group) for group in (inner.critic_wg, inner.rm_wg, inner.ref_policy_wg)
        )

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
        metrics |= balance_metrics(batch, share_rows(batch, self.inner.actor_wg.world_size))

    def _log_rollout_data(self, batch: DataProto, reward_extra_infos_dict: Any, timing_raw: Any, rollout_data_dir: str) -> None:
        write_samples(rollout_data_dir, self.global_steps, batch, dict(reward_extra_infos_dict), self.tokenizer)


class _Calls:
    """A worker group with verl's calls: a whole batch in, a DataProto out. Every other attribute is the group's own."""

    def __init__(self, trainer: VerlTrainer, group: Any) -> None:
        self._trainer, self._group, self._inner = trainer, group, trainer.inner

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._group, name)
        is_measure = name in ("compute_log_prob", "compute_ref_log_prob", "compute_values")
        return (lambda data: call(data.select(["prompts", "responses"], []))) if is_measure else call

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """prompts, responses, response_mask and rollout_log_probs for input_ids: rollout.n of each prompt unless they stand there n times
        already, or one, greedy, where meta_info has do_sample=False. Where the trainer was given no reward_fn also rm_scores."""
        inner, greedy = self._inner, prompts.meta_info.get("do_sample") is False
        sampling = dataclasses.replace(inner.sampling, temperature=0.0) if greedy else inner.sampling
        lengths = prompts.batch["attention_mask"].sum(1)
        ids = Ragged.from_padded(prompts.batch["input_ids"], lengths, "left")
        objects = {name: prompts.non_tensor_batch[name] for name in ("index", *_REWARD_COLUMNS) if name in prompts.non_tensor_batch}
        rows = DataProto({"prompts": ids}, objects, {"pad_token_id": self._trainer.tokenizer.pad_token_id})
        given = prompts.non_tensor_batch["raw_prompt_ids"]
        first = [i == 0 or given[i] is not given[i - 1] for i in range(len(given))]  # repeat() repeats the object itself
        n = inner.config.actor_rollout_ref.rollout.n
        if not greedy and n > 1 and all(first):
            rows, first = rows.repeat(n), [sample == 0 for _ in given for sample in range(n)]
        places = np.cumsum(first)
        rows.non_tensor_batch.setdefault("index", places.astype(object))
        rows.non_tensor_batch["sample"] = (np.arange(len(first)) - np.flatnonzero(first)[places - 1]).astype(object)
        stages.generate(inner.rollout_wg, rows, sampling, inner.prompts.num_taken)
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
        inner, numbers = self._inner, np.arange(len(data), dtype=object)
        objects = {name: data.non_tensor_batch.get(name, numbers) for name in ("index", "sample")}
        updates = self._updates(data, inner.actor_prompts, inner.config.actor_rollout_ref.actor.ppo_epochs)
        rows = DataProto(dict(data.columns), objects, dict(data.meta_info))
        metrics, _ = stages.update_actor(self._group, rows, updates, inner.policy_update)
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


class _Rows(Dataset[dict[str, Any]]):
    """The rows of a dataset as verl's: padded input_ids, attention_mask, position_ids, and raw_prompt_ids for prompt_ids."""

    def __init__(self, dataset: Any, pad_token_id: int, width: int) -> None:
        self._dataset, self._pad, self._width = dataset, pad_token_id, width

    def __getitem__(self, position: int) -> dict[str, Any]:
        row = dict(self._dataset[position])
        ids = row.pop("prompt_ids")
        padding = self._width - len(ids)
        mask = torch.tensor([0] * padding + [1] * len(ids))
        blocks = {"input_ids": torch.tensor([self._pad] * padding + ids), "attention_mask": mask, "raw_prompt_ids": ids}
        return row | blocks | {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


class _Epoch:
    """The batches that are left of an epoch."""

    def __init__(self, schedule: PromptSchedule, prompts: Any) -> None:
        self._schedule, self._prompts = schedule, prompts

    def __len__(self) -> int:
        return self._schedule.steps_per_epoch

    def __iter__(self) -> Iterator[Sequence[int]]:
        for _ in range(self._prompts.num_taken % len(self), len(self)):
            self._prompts.num_taken += 1
            yield self._schedule.batch(self._prompts.num_taken - 1)
