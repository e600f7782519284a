"""DPOTrainer: learning from preferences. A step is a batch of pairs, or of labelled answers, and one update.

An update needs these columns beside the rows:

```text
unit                   D  rows with the same number are a pair
ref_response_log_prob  D  log-prob of the row's response under the reference: the sum over its trained tokens, float64
```
"""

import dataclasses
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.binding import Bound
from lockstep.algorithms.preference_losses import (
    PreferenceLoss,
    bind_preference_prepare,
    get_preference_loss,
    missing_numbers,
    needs_reference,
    preference_inputs,
    takes_pairs,
    try_preference_loss,
)
from lockstep.algorithms.rows import Rows
from lockstep.config.dpo import DPOConfig, PreferenceLossConfig, ReferenceConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.stage import STAGE_KEYS
from lockstep.data.pairs import PairDataset
from lockstep.errors import ConfigError, DataError, NumericalError
from lockstep.models.hf_config import read_model_config
from lockstep.models.weight_files import count_parameters
from lockstep.observability.display import View
from lockstep.observability.statistics import wilson_interval
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base import ClassWithInitArgs, WorkerGroup
from lockstep.trainer.ppo.interfaces import Reference
from lockstep.trainer.reference_file import fingerprint, reference_path, with_reference
from lockstep.trainer.role import Role
from lockstep.trainer.run.launch import FROZEN, RoleSpec
from lockstep.trainer.stage_run import StageRun, whole_batches
from lockstep.utils.files import load_reference

WHY_CHOSEN_FALLS = (
    "log-probs of chosen answers may fall with those of rejected ones: the loss asks for their difference only, and what both have in "
    "common falls with it. loss.nll_coef=0.2 holds the chosen ones (docs/dpo.md)"
)


class Policy(Protocol):
    """The group of workers of the model that learns."""

    def compute_log_prob(self, data: DataProto, /) -> DataProto:
        """Read prompts, responses; return old_log_probs."""


class AdapterRole(Enum):
    """A model with adapters, which is its own reference without them."""

    ActorRef = 0

    def __str__(self) -> str:
        return "actor_ref"


class DPOTrainer(StageRun):
    """Trains a model on the preferences in data.train_files."""

    config: DPOConfig
    view = View(
        (
            ("loss", ".4f", ("train/loss",)),
            ("accuracy", ".3f", ("train/accuracy",)),
            ("margin", ".3f", ("train/margin",)),
            ("chosen", ".1f", ("train/chosen_log_prob",)),
            ("rejected", ".1f", ("train/rejected_log_prob",)),
            ("seconds", ".1f", ("timing_s/step",)),
        ),
        curve=("loss", "train/loss"),
        validation=("val/loss", "val/accuracy"),
    )

    def __init__(
        self, config: DPOConfig, tokenizer: Any, worker_cls: type, group_cls: type[WorkerGroup], make_loss: Callable[[], Any]
    ) -> None:
        loss = resolve_loss(config.loss)
        data = config.data
        self._takes_pairs = takes_pairs(loss)
        self._prepare_loss = bind_preference_prepare(loss, config.loss.parameters)
        self.reference_mode = config.reference_mode if needs_reference(loss) else "none"
        if self.reference_mode == "none" and config.reference != ReferenceConfig():
            name = "path" if config.reference.path is not None else "mode"
            raise ConfigError(f"reference.{name} is set, but loss.loss_mode={config.loss.loss_mode} has no reference; leave it out")
        if self.reference_mode == "file" and self._prepare_loss is not None:
            raise ConfigError(
                f"loss.loss_mode={config.loss.loss_mode} compares with answers to other prompts of a batch, whose log-probs no file has; "
                "set reference.mode=model, or adapter with LoRA"
            )
        open_rows = partial(
            PairDataset,
            tokenizer=tokenizer,
            max_length=data.max_length,
            truncation=data.truncation,
            filter_overlong=data.filter_overlong_rows,
            skip_identical=data.skip_identical,
            template_kwargs=data.apply_chat_template_kwargs,
        )
        train = open_rows(data.train_files, max_samples=data.train_max_samples)
        val = open_rows(data.val_files, max_samples=data.val_max_samples) if data.val_files else None
        if self._takes_pairs and not all(rows.is_paired for rows in (train, val) if rows is not None):
            raise DataError(
                f"loss.loss_mode={config.loss.loss_mode} learns from pairs, but there are rows with one answer and a label; use kto"
            )
        if self._prepare_loss is not None:
            for key, count in (
                ("data.train_batch_size", data.train_batch_size),
                ("rows of data.val_files", len(val) if val else 2),
            ):
                if count < 2:
                    raise ConfigError(
                        f"loss.loss_mode={config.loss.loss_mode} compares with answers to other prompts of a batch, and {key}={count} has "
                        "none; make it 2 or more"
                    )
        if self.reference_mode == "model" and config.reference.path is not None:
            _check_vocabulary(config.model, config.reference.path)
        self.role = AdapterRole.ActorRef if self.reference_mode == "adapter" else Role.Actor
        self.more_roles = (Role.RefPolicy,) if self.reference_mode == "model" else ()
        self.rows_per_example = 2 if train.is_paired else 1
        super().__init__(config, tokenizer, worker_cls, group_cls, make_loss, train, val)
        if self._prepare_loss is not None:
            self._check_prompts(train, val)

    def _check_prompts(self, train: PairDataset, val: PairDataset | None) -> None:
        """Raise ConfigError for the first batch that has only one prompt: it has no other answers to compare with."""
        size = self.rows_per_step
        prompts = train.same_prompts()
        if np.unique(prompts, return_counts=True)[1].max() >= size:  # else there is none
            for step in range(self.total_steps):
                if len(set(prompts[self.schedule.batch(step)])) == 1:
                    self._refuse(
                        f"step {step + 1}", "raise data.train_batch_size, or mix the rows (data.shuffle=true, or another data.seed)"
                    )
        if val is not None:
            prompts, count = val.same_prompts(), len(val)
            first = self.section.first_validation_rows(count, 1, size) if self.section.val_before_train else []
            for rows in (range(count), first):
                for start, end in whole_batches(len(rows), size):
                    if len(set(prompts[list(rows[start:end])])) == 1:
                        self._refuse(
                            f"the validation batch from row {rows[start]} on", "mix the rows, or raise data.train_batch_size"
                        )

    def _refuse(self, batch: str, remedy: str) -> None:
        raise ConfigError(
            f"loss.loss_mode={self.config.loss.loss_mode} compares with answers to other prompts of a batch, and in {batch} all "
            f"answers are to one prompt; {remedy}"
        )

    def init_workers(self) -> None:
        """As every recipe; with reference.mode=file also compute the reference's log-probs, unless a file has them."""
        super().init_workers()
        by_role = self.workers.by_role
        self.reference: Any = by_role.get(Role.RefPolicy, self.model_wg if self.reference_mode == "adapter" else None)
        if self.reference_mode == "file":
            self.train_data = self._referenced(self.config.data.train_files, self.train_data, self.config.data.train_max_samples)
            if self.val_data is not None:
                self.val_data = self._referenced(self.config.data.val_files, self.val_data, self.config.data.val_max_samples)

    def _referenced(self, files: Any, rows: Any, max_samples: int) -> Any:
        """Return the rows with the reference's log-probs. Call it before a checkpoint is loaded: the model is still the reference."""
        data = self.config.data
        model = self.config.model
        engine = self.config.engine.engine
        settings = {
            "max_length": data.max_length,
            "truncation": data.truncation,
            **({"filter_overlong_rows": True} if data.filter_overlong_rows else {}),
            "skip_identical": data.skip_identical,
            "template": data.apply_chat_template_kwargs,
            "max_samples": max_samples,
            "override_config": model.override_config,
            "computes in": f"{engine.dtype} on {self.section.device}",
        }
        path = reference_path(files, self.config.reference.folder, fingerprint(str(model.path), files, settings))
        found = path.is_file()
        self.display.message(f"the reference's log-probs of {len(rows)} rows {'are in' if found else 'go to'} {path}")
        return with_reference(rows, path, partial(actor_log_prob, self.model_wg), data.train_batch_size)

    # -- what a recipe defines ---------------------------------------------------------------------------------------------

    def _prepare(self, batch: DataProto) -> DataProto:
        if self._takes_pairs:
            couple_pairs(batch)
        if self.reference is not None:
            with self.timer.stage("reference"):
                reference_log_prob(self.reference, batch)
        if self._prepare_loss is not None:
            whole_batch_columns(self._prepare_loss, self.model_wg, self.reference, batch, self.config.data.max_length)
        return batch

    def _metrics(self, batch: DataProto, measured: dict[str, float]) -> dict[str, float]:
        count = len(batch) // 2 if self._takes_pairs else len(batch)
        low, high = wilson_interval(measured["train/accuracy"] * count, count)
        rewards = [measured[name] for name in ("train/chosen_reward", "train/rejected_reward") if name in measured]
        # A batch of answers with labels may have good ones alone, or bad ones.
        margin = {"train/margin": rewards[0] - rewards[1]} if len(rewards) == 2 else {}
        return measured | margin | {"train/accuracy_low": low, "train/accuracy_high": high}

    def _describe(self) -> str:
        return f"{super()._describe()}\n{WHY_CHOSEN_FALLS}"

    def _specs(self) -> dict[Enum, RoleSpec]:
        specs = super()._specs()
        if Role.RefPolicy in self.more_roles:
            config = self.config
            path = config.reference.path or config.model.path
            model = dataclasses.replace(config.model, path=path, lora_rank=0, lora_adapter_path=None)
            worker = ClassWithInitArgs(
                self._worker_cls,
                config=dataclasses.replace(config.policy(), model=model),
                role=str(Role.RefPolicy),
                seed=config.trainer.seed,
                pad_token_id=self.tokenizer.pad_token_id,
                total_updates=0,
                keys=STAGE_KEYS,
            )
            specs[Role.RefPolicy] = RoleSpec(worker, self._load_of, (count_parameters(str(model.path)) or 0) * FROZEN)
        return specs


def resolve_loss(config: PreferenceLossConfig) -> PreferenceLoss:
    """Return the configured loss. Raise ConfigError unless it exists, has all numbers that it requires, has an argument for every given
    number, and can be called."""
    try:
        loss: PreferenceLoss = load_reference(config.loss_mode) or get_preference_loss(config.loss_mode)
    except ConfigError as error:
        raise ConfigError(f"loss.loss_mode: {error}") from error
    names = preference_inputs(loss)
    for key, value in config.parameters.items():
        if value is not None and key not in names:
            where = "loss.beta" if key == "beta" else f"loss.loss_kwargs.{key}"
            raise ConfigError(f"{where} is not an argument of the loss {config.loss_mode}, which reads {', '.join(names)}")
    missing = missing_numbers(loss, config.loss_kwargs)
    if missing:
        raise ConfigError(f"the loss {config.loss_mode} needs {', '.join(missing)}; set loss.loss_kwargs.{missing[0]}")
    try_preference_loss(loss, config.parameters)
    return loss


def _check_vocabulary(model: ModelConfig, reference: str) -> None:
    """Raise ConfigError unless the reference has the model's vocabulary."""
    sizes = {
        path: read_model_config(path, model.trust_remote_code).get_text_config().vocab_size for path in (str(model.path), reference)
    }
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"reference.path must have the vocabulary of model.path, but their sizes are {sizes}")


# -- stages ----------------------------------------------------------------------------------------------------------------


def couple_pairs(batch: DataProto) -> None:
    """Write unit: rows 0 and 1 are a pair, 2 and 3, ..."""
    batch.set("unit", torch.arange(len(batch) // 2).repeat_interleave(2))


def reference_log_prob(reference: Reference, batch: DataProto) -> None:
    """Read prompts, responses, response_mask. Write ref_response_log_prob."""
    batch.set("ref_response_log_prob", _sums(reference.compute_ref_log_prob(_tokens(batch)), "ref_log_prob", batch))


def actor_log_prob(actor: Policy, batch: DataProto) -> Tensor:
    """Read prompts, responses, response_mask. Return the log-prob of each response [rows] under the present policy."""
    return _sums(actor.compute_log_prob(_tokens(batch)), "old_log_probs", batch)


def whole_batch_columns(prepare: Bound, actor: Policy, reference: Reference, batch: DataProto, max_length: int) -> None:
    """Read prompts, responses, response_mask, is_chosen. Write the columns that the loss's `prepare` computes from the whole batch, if it
    asks for them with log-probs of mismatched responses."""
    given: dict[str, Any] = {"is_chosen": batch.columns["is_chosen"]}
    if {"mismatched_log_prob", "mismatched_ref_log_prob"} & set(prepare.columns):
        others = mismatched(batch, max_length)
        reference_log_prob(reference, others)
        given |= {
            "mismatched_log_prob": actor_log_prob(actor, others),
            "mismatched_ref_log_prob": others.columns["ref_response_log_prob"],
        }
    for name, column in prepare(given, None).items():
        batch.set(name, column)


def mismatched(batch: DataProto, max_length: int) -> DataProto:
    """Return each row's prompt with the response of the next row that has another prompt, cut to `max_length` tokens.

    Raise DataError if all prompts are the same.
    """
    prompts = batch.ragged("prompts")
    count = len(batch)
    rows = prompts.rows()
    order = []
    for i in range(count):
        others = ((i + step) % count for step in range(1, count))
        found = next((j for j in others if not torch.equal(rows[i], rows[j])), None)
        if found is None:
            raise DataError(
                f"all {count} rows of a batch have the same prompt, but the loss compares with answers to other prompts; raise "
                "data.train_batch_size, or shuffle"
            )
        order.append(found)
    limits = (max_length - prompts.lengths).tolist()

    def cut(name: str) -> Ragged:
        chosen = batch.ragged(name).select(torch.tensor(order)).rows()
        return Ragged.from_rows([row[:limit] for row, limit in zip(chosen, limits, strict=True)])

    columns = {"prompts": prompts, "responses": cut("responses"), "response_mask": cut("response_mask")}
    return DataProto.from_dict(columns, {"index": batch.non_tensor_batch["index"]})


def _tokens(batch: DataProto) -> DataProto:
    return batch.select(["prompts", "responses"], [])


def _sums(found: DataProto, name: str, batch: DataProto) -> Tensor:
    mask = batch.ragged("response_mask")
    column = found.ragged(name)
    sums = Rows(mask.lengths).sum(torch.where(mask.values.bool(), column.values, 0.0).double())
    if not sums.isfinite().all():
        bad = [batch.non_tensor_batch["index"][row] for row in (~sums.isfinite()).nonzero().flatten().tolist()]
        raise NumericalError(f"{name} is not finite for {len(bad)} rows; dataset rows {bad[:10]}. Nothing was updated")
    return sums
