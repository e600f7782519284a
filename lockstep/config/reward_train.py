"""`lockstep reward-model`: a reward model from pairs."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockstep.config.check import at_least
from lockstep.config.stage import FilesConfig, StageConfig
from lockstep.errors import ConfigError


@dataclass
class PairsConfig(FilesConfig):
    """`data.*`: the pairs that are learned."""

    train_files: Any = None
    """Pairs to train on: a file (parquet, json, jsonl), a folder, a pattern such as data/*.parquet, or a list of these,
    with the columns chosen and rejected, with prompt and margin
    where there are any."""
    val_files: Any = None
    """Pairs to validate on, in the same forms; null means none."""
    max_length: int = 2048
    """The longest prompt with its response, in tokens."""
    train_batch_size: int = 64
    """Pairs a step, which is one update."""
    skip_identical: bool = False
    """Leave out pairs whose answers are the same, instead of stopping at them."""


@dataclass
class RewardLossConfig:
    """What is made of a pair."""

    center_rewards_coefficient: float = 0.01
    """Weight of the square of a pair's added scores, which keeps their mean at 0; 0 leaves it free."""

    def __post_init__(self) -> None:
        at_least(self, "loss", 0.0, "center_rewards_coefficient")


@dataclass
class RewardTrainConfig(StageConfig):
    """Everything a run that trains a reward model needs to know."""

    command: ClassVar[str] = "lockstep reward-model"
    about: ClassVar[str] = "Train a reward model on pairs. It needs model.path and data.train_files."

    data: PairsConfig = field(default_factory=PairsConfig)
    loss: RewardLossConfig = field(default_factory=RewardLossConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data.train_files:
            raise ConfigError(
                "data.train_files is empty; name a parquet, json or jsonl file with the columns chosen and rejected",
                key="data.train_files",
            )
        if self.data.truncation == "right":
            raise ConfigError(
                "data.truncation=right cuts off the end of a response, where its score is read; use left or middle",
                key="data.truncation",
            )
        self.trainer.check_validated(bool(self.data.val_files))
        self.check_pairs(self.data.max_length)
