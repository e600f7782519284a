"""DPOTrainer: learning from preferences. A step is a batch of pairs, or of labelled answers, and one update."""

import dataclasses
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

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
from lockstep.config.dpo import DPOConfig, PreferenceLossConfig, ReferenceConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.stage import STAGE_KEYS
from lockstep.data.pairs import PairDataset
from lockstep.errors import ConfigError, DataError
from lockstep.models.hf_config import read_model_config
from lockstep.models.weight_files import count_parameters
from lockstep.observability.display import View
from lockstep.observability.statistics import wilson_interval
from lockstep.protocol import DataProto
from lockstep.single_controller.base import ClassWithInitArgs, WorkerGroup
from lockstep.trainer.dpo.reference_file import fingerprint, reference_path, with_reference
from lockstep.trainer.dpo.stages import couple_pairs, reference_log_prob, whole_batch_columns
from lockstep.trainer.role import Role
from lockstep.trainer.run.launch import FROZEN, RoleSpec
from lockstep.trainer.stage_run import StageRun, whole_batches
from lockstep.utils.files import load_reference

WHY_CHOSEN_FALLS = (
    "log-probs of chosen answers may fall with those of rejected ones: the loss asks for their difference only, and what both have in "
    "common falls with it. loss.nll_coef=0.2 holds the chosen ones (docs/dpo.md)"
)


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
        loss, data = resolve_loss(config.loss), config.data
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
        """Raise ConfigError for the first batch that has one prompt alone: nobody's answers are there to compare with."""
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
        """As every recipe; with reference.mode=file it also computes the reference's log-probs, unless there is a file with them."""
        super().init_workers()
        by_role = self.workers.by_role
        self.reference: Any = by_role.get(Role.RefPolicy, self.model_wg if self.reference_mode == "adapter" else None)
        if self.reference_mode == "file":
            self.train_data = self._referenced(self.config.data.train_files, self.train_data, self.config.data.train_max_samples)
            if self.val_data is not None:
                self.val_data = self._referenced(self.config.data.val_files, self.val_data, self.config.data.val_max_samples)

    def _referenced(self, files: Any, rows: Any, max_samples: int) -> Any:
        """The rows with the reference's log-probs. Called before any checkpoint is loaded: the model is still the reference."""
        data, model, engine = self.config.data, self.config.model, self.config.engine.engine
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
        return with_reference(rows, path, self.model_wg, data.train_batch_size)

    # -- what a recipe gives -----------------------------------------------------------------------------------------------

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
    """The loss that is asked for. Raises ConfigError unless it exists, every number that it requires is given, every number that is
    given is an argument of it, and it can be called."""
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
    """The reference reads the model's tokens."""
    sizes = {
        path: read_model_config(path, model.trust_remote_code).get_text_config().vocab_size for path in (str(model.path), reference)
    }
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"reference.path must have the vocabulary of model.path, but their sizes are {sizes}")
