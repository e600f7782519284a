"""RewardModelTrainer: a model whose score of a response says how much people prefer it, from pairs of a chosen and a rejected one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lockstep.config.reward_train import RewardTrainConfig
from lockstep.data.pairs import PairDataset
from lockstep.errors import DataError
from lockstep.observability.display import View
from lockstep.observability.statistics import wilson_interval
from lockstep.protocol import DataProto
from lockstep.single_controller.base import WorkerGroup
from lockstep.trainer.stage_run import StageRun


class RewardModelTrainer(StageRun):
    """Trains a score head and the model under it on the pairs in data.train_files."""

    config: RewardTrainConfig
    head = "score"
    rows_per_example = 2
    view = View(
        (
            ("loss", ".4f", ("train/loss",)),
            ("accuracy", ".3f", ("train/accuracy",)),
            ("margin", ".2f", ("train/margin",)),
            ("tokens/s", ".0f", ("perf/throughput",)),
            ("lr", ".2e", ("train/lr",)),
            ("seconds", ".1f", ("timing_s/step",)),
        ),
        curve=("accuracy", "train/accuracy"),
        validation=("val/accuracy", "val/loss"),
    )

    def __init__(
        self,
        config: RewardTrainConfig,
        tokenizer: Any,
        worker_cls: type,
        group_cls: type[WorkerGroup],
        make_loss: Callable[[], Any],
    ) -> None:
        data = config.data
        open_pairs = partial(
            PairDataset,
            tokenizer=tokenizer,
            max_length=data.max_length,
            truncation=data.truncation,
            filter_overlong=data.filter_overlong_rows,
            skip_identical=data.skip_identical,
            whole=True,
        )
        train = open_pairs(data.train_files, max_samples=data.train_max_samples)
        val = open_pairs(data.val_files, max_samples=data.val_max_samples) if data.val_files else None
        for name, rows in (("train_files", train), ("val_files", val)):
            if rows is not None and not rows.is_paired:
                raise DataError(f"data.{name} has answers with a label; a reward model learns from pairs: chosen and rejected")
        super().__init__(config, tokenizer, worker_cls, group_cls, make_loss, train, val)
        self._prepare(train.batch([0]))

    def _prepare(self, batch: DataProto) -> DataProto:
        """Make the two rows of a pair a unit. Raise DataError if a row ends with padding: transformers would not read its end."""
        responses = batch.ragged("responses")
        pad = self.tokenizer.pad_token_id
        ends = responses.values[torch.cumsum(responses.lengths, 0) - 1]
        if (ends == pad).any():
            row = batch.non_tensor_batch["index"][int((ends == pad).nonzero()[0])]
            raise DataError(
                f"row {row} ends with the padding token {self.tokenizer.pad_token!r}, where the score is read; transformers skips padding. "
                "Give the tokenizer another pad_token in tokenizer_config.json"
            )
        batch.columns["unit"] = torch.arange(len(batch)) // 2
        return batch

    def _validate_on(self, positions: Sequence[int]) -> dict[str, float]:
        """As every recipe. If the rows are of several sources (`data_source`), also return the accuracy on each, as val/accuracy/SOURCE."""
        assert isinstance(self.val_data, PairDataset)
        chosen = {*positions}
        by_source = {}
        for source, rows in self.val_data.sources().items():
            rows_of_source = [row for row in rows if row in chosen]
            if rows_of_source:
                by_source[source] = self._measure(rows_of_source)
        metrics = self._val_metrics([part for measured in by_source.values() for part in measured])
        if len(by_source) > 1:
            for source, measured in by_source.items():
                found = self._val_metrics(measured)
                for name in ("accuracy", "accuracy_low", "accuracy_high"):
                    metrics[f"val/{name}/{source}"] = found[f"val/{name}"]
        return metrics

    def _metrics(self, batch: DataProto, measured: dict[str, float]) -> dict[str, float]:
        pairs = len(batch) // 2
        bins = [measured.pop(name) for name in list(measured) if name.startswith("train/bin/")]
        low, high = wilson_interval(measured["train/accuracy"] * pairs, pairs)
        longer = batch.ragged("responses").lengths.view(-1, 2).diff().sign().neg()
        return measured | {
            "train/accuracy_low": low,
            "train/accuracy_high": high,
            "train/length_accuracy": float((longer + 1).double().mean() / 2),
            "train/calibration_error": sum(map(abs, bins)) / pairs,
            "train/row_length": float(batch.token_counts().double().mean()),
        }
