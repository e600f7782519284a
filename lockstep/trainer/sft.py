"""SFTTrainer: supervised fine-tuning. The loss is the mean negative log-likelihood of the trained tokens of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import Subset

from lockstep.config.data import DataConfig
from lockstep.config.sampling import SamplingParams
from lockstep.config.sft import SFTConfig
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.data.supervised import SupervisedDataset
from lockstep.models.hf_config import stop_token_ids
from lockstep.observability.display import View
from lockstep.protocol import DataProto
from lockstep.single_controller.base import WorkerGroup
from lockstep.trainer.ppo.interfaces import Rollout, RolloutWorkers
from lockstep.trainer.ppo.rewards import Judge
from lockstep.trainer.ppo.validation import validate
from lockstep.trainer.role import Role
from lockstep.trainer.stage_run import StageRun


@dataclass(frozen=True)
class SampledAnswers:
    """Prompts that the model answers at each validation, as PPO validates: sampling parameters and judge."""

    config: SFTConfig
    dataset: RLHFDataset
    sampling: SamplingParams
    judge: Judge

    @classmethod
    def of(cls, config: SFTConfig, tokenizer: Any, reward_fn: Any) -> SampledAnswers:
        """Open the prompts of sampled.files. Raise DataError if they cannot be used, ConfigError if nothing judges some of them."""
        own = config.sampled
        section = config.trainer
        data = DataConfig(
            max_prompt_length=own.max_prompt_length,
            shuffle=False,
            apply_chat_template_kwargs=config.data.apply_chat_template_kwargs,
        )
        dataset = RLHFDataset(own.files, tokenizer, data, own.max_samples)
        reward_fn.check(dataset.tags(), validation=True)
        sampling = own.params(
            max_tokens=own.max_response_length,
            stop_token_ids=stop_token_ids(str(config.model.path), tokenizer),
            seed=section.seed,
        )
        return cls(config, dataset, sampling, Judge(reward_fn, tokenizer, config.reward.max_failure_rate, section.run_dir))

    def validate(self, rollout: Rollout, step: int, rows: list[int], first: list[int] | None) -> dict[str, float]:
        """Answer the prompts in these rows and judge them; write the samples to the run's folder `validation`. `first` are the rows of the
        validation before the first step (trainer/ppo/validation.py::validate)."""
        own = self.config.sampled
        return validate(
            Subset(self.dataset, rows),
            rollout,
            self.sampling,
            self.judge,
            step,
            n=own.n,
            batch_size=own.batch_size,
            folder=self.config.trainer.run_dir / "validation",
            first=first,
        )


class SFTTrainer(StageRun):
    """Trains a model on the examples in data.train_files.

    With `sampled` (prompts with a reward) it also answers those at each validation, and reports how good the answers are.
    """

    config: SFTConfig
    view = View(
        (
            ("nll", ".4f", ("train/nll",)),
            ("accuracy", ".3f", ("train/token_accuracy",)),
            ("tokens/s", ".0f", ("perf/throughput",)),
            ("lr", ".2e", ("train/lr",)),
            ("seconds", ".1f", ("timing_s/step",)),
        ),
        curve=("nll", "train/nll"),
        validation=("val/nll", "val-core/"),
    )

    def __init__(
        self,
        config: SFTConfig,
        tokenizer: Any,
        worker_cls: type,
        group_cls: type[WorkerGroup],
        make_loss: Callable[[], Any],
        sampled: SampledAnswers | None = None,
    ) -> None:
        data = config.data
        open_rows = partial(
            SupervisedDataset,
            tokenizer=tokenizer,
            train_on=data.train_on,
            max_length=data.max_length,
            truncation=data.truncation,
            filter_overlong=data.filter_overlong_rows,
            template_kwargs=data.apply_chat_template_kwargs,
        )
        train = open_rows(data.train_files, max_samples=data.train_max_samples)
        val = open_rows(data.val_files, max_samples=data.val_max_samples) if data.val_files else None
        self.sampled = sampled
        if sampled is not None and self.role is Role.Actor:
            self.role = Role.ActorRollout
        super().__init__(config, tokenizer, worker_cls, group_cls, make_loss, train, val)
        self.has_validation = val is not None or sampled is not None

    def _validate(self) -> dict[str, float]:
        """Return the loss on the validation rows under val/, and the results of sampled answers under val-core/ and val-aux/."""
        metrics = super()._validate() if self.val_data is not None else {}
        if self.sampled is not None:
            count, n = len(self.sampled.dataset), self.config.sampled.n
            rows = self._validated_rows("sampled", count, n, self.config.data.train_batch_size)
            metrics |= self.sampled.validate(
                RolloutWorkers(self.model_wg), self.global_steps, rows, self._first_rows("sampled", count)
            )
        return metrics

    def _metrics(self, batch: DataProto, measured: dict[str, float]) -> dict[str, float]:
        counts = batch.token_counts()
        trained = int(batch.ragged("response_mask").values.sum())
        num_bytes = sum(batch.non_tensor_batch["num_bytes"])
        metrics = measured | {
            "train/trained_share": trained / int(counts.sum()),
            "train/row_length": float(counts.double().mean()),
        }
        if num_bytes:
            metrics["train/bits_per_byte"] = measured["train/nll"] * trained / math.log(2) / num_bytes
        return metrics
