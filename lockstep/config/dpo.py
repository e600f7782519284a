"""`lockstep dpo`: learning from preferences."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockstep.config.check import absolute_reference, at_home, at_least, one_of
from lockstep.config.engine import OptimConfig
from lockstep.config.reward_train import PairsConfig
from lockstep.config.stage import StageConfig, stage_optim
from lockstep.errors import ConfigError

REFERENCES = ("auto", "model", "adapter", "file")
UNPAIRED = "kto"
"""The loss that takes answers with a label."""


@dataclass
class PreferencesConfig(PairsConfig):
    """`data.*`: the preferences that are learned."""

    train_files: Any = None
    """Rows to train on: a file (parquet, json, jsonl), a folder, a pattern such as data/*.parquet, or a list of these,
    with the columns chosen and rejected, and prompt unless both
    begin with it; or, for kto, prompt, completion and label."""
    val_files: Any = None
    """Rows to validate on, in the same forms; null means none."""
    train_batch_size: int = 64
    """Pairs (or answers with a label) a step, which is one update."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, for example {enable_thinking: false}."""


@dataclass
class PreferenceLossConfig:
    """`loss.*`: what is made of a pair."""

    loss_mode: str = "sigmoid"
    """The loss: sigmoid (DPO), smoothed, robust, hinge, ipo, sigmoid_norm, kto, cpo, simpo, orpo, or path.py:function of your own; see
    docs/algorithms/preference.md."""
    beta: float | None = None
    """How strongly rewards follow log-probs; null means what suits the loss: 0.1, for simpo 2, for sigmoid_norm 5."""
    nll_coef: float | None = None
    """Weight of the chosen answer's mean negative log-prob, which is added; null means 1 for cpo and orpo, else 0."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Other numbers of the loss by name, for example {label_smoothing: 0.2}."""

    def __post_init__(self) -> None:
        self.loss_mode = absolute_reference(self.loss_mode)
        at_least(self, "loss", 0.0, "nll_coef")
        if self.beta is not None and not self.beta > 0:
            raise ConfigError(f"loss.beta={self.beta} must be above 0; null means what suits the loss", key="loss.beta")

    @property
    def parameters(self) -> dict[str, Any]:
        """The numbers that a loss may ask for, by the names of its arguments."""
        return {"beta": self.beta} | self.loss_kwargs


@dataclass
class ReferenceConfig:
    """`reference.*`: the model that rewards are measured against."""

    mode: str = "auto"
    """Where its log-probs come from: model (loaded beside the one that learns), adapter (that one with its adapters off), file (computed
    once before training, kept beside the data and found again), or auto: adapter with LoRA, else model."""
    path: str | None = None
    """The model, with mode=model; null means model.path."""
    folder: str | None = None
    """Where mode=file keeps its files; null means beside the data."""

    def __post_init__(self) -> None:
        at_home(self, "path", "folder")
        one_of("reference.mode", self.mode, REFERENCES)
        if self.path is not None and self.mode in ("adapter", "file"):
            raise ConfigError(
                f"reference.path is set, but with reference.mode={self.mode} the reference is model.path itself; set reference.mode=model",
                key="reference.path",
            )
        if self.folder is not None and self.mode != "file":
            raise ConfigError(
                f"reference.folder is where reference.mode=file keeps its files, but reference.mode={self.mode} has none; set "
                "reference.mode=file, or leave reference.folder out",
                key="reference.folder",
            )


@dataclass
class DPOConfig(StageConfig):
    """Everything a run of preference learning needs to know."""

    command: ClassVar[str] = "lockstep dpo"
    about: ClassVar[str] = "Learn from preferences. It needs model.path and data.train_files."

    data: PreferencesConfig = field(default_factory=PreferencesConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    optim: OptimConfig = field(default_factory=lambda: stage_optim(1e-6))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data.train_files:
            raise ConfigError(
                "data.train_files is empty; name a parquet, json or jsonl file with the columns prompt, chosen and rejected",
                key="data.train_files",
            )
        if self.reference.mode == "adapter" and not self.model.adapts:
            raise ConfigError(
                "reference.mode=adapter switches adapters off, but there are none; set model.lora_rank, or mode=model",
                key="reference.mode",
            )
        if self.reference.mode == "file" and self.model.lora_adapter_path is not None:
            raise ConfigError(
                "reference.mode=file is of the model that training starts from, but with model.lora_adapter_path the reference is the "
                "model without the adapter; set reference.mode=adapter",
                key="reference.mode",
            )
        self.trainer.check_validated(bool(self.data.val_files))
        if self.loss.loss_mode == UNPAIRED:
            self.check_longest("data.max_length", self.data.max_length)
            return
        self.check_pairs(self.data.max_length)

    @property
    def reference_mode(self) -> str:
        """model, adapter or file."""
        if self.reference.mode != "auto":
            return self.reference.mode
        return "adapter" if self.model.adapts and self.reference.path is None else "model"
