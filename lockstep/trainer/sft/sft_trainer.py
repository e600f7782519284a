"""SFTTrainer: supervised fine-tuning. The loss is the mean negative log-likelihood of the trained tokens of a batch."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.config.sft import SFTConfig
from lockstep.data.supervised import SupervisedDataset
from lockstep.observability.display import View
from lockstep.protocol import DataProto
from lockstep.single_controller.base import WorkerGroup
from lockstep.trainer.ppo.interfaces import RolloutWorkers
from lockstep.trainer.role import Role
from lockstep.trainer.sft.sampled import SampledAnswers
from lockstep.trainer.stage_run import StageRun


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
        """Loss on the validation rows under val/; of sampled answers what PPO's validation reports, under val-core/ and val-aux/."""
        metrics = super()._validate() if self.val_data is not None else {}
        if self.sampled is not None:
            count, n = len(self.sampled.dataset), self.config.sampled.n
            rows = self._validated_rows("sampled", count, n, self.config.data.train_batch_size)
            metrics |= self.sampled.validate(
                RolloutWorkers(self.model_wg), self.global_steps, rows, self._first_rows("sampled", count)
            )
        return metrics

    def _metrics(self, batch: DataProto, measured: dict[str, float]) -> dict[str, float]:
        mask, counts = batch.ragged("response_mask").values, batch.token_counts()
        trained, num_bytes = int(mask.sum()), sum(batch.non_tensor_batch["num_bytes"])
        metrics = measured | {
            "train/trained_share": trained / int(counts.sum()),
            "train/row_length": float(counts.double().mean()),
        }
        if num_bytes:
            metrics["train/bits_per_byte"] = measured["train/nll"] * trained / math.log(2) / num_bytes
        return metrics
