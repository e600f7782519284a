"""`lockstep sft`: supervised fine-tuning."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockstep.config.check import all_or_at_least_one, at_home, at_least, file_names, one_of
from lockstep.config.reward import JudgeConfig
from lockstep.config.sampling import SamplingConfig
from lockstep.config.stage import FilesConfig, StageConfig
from lockstep.errors import ConfigError

TRAIN_ON = ("assistant", "last", "all", "flag")


@dataclass
class ExamplesConfig(FilesConfig):
    """`data.*`: the rows that are learned."""

    train_files: Any = None
    """Rows to train on: a file (parquet, json, jsonl), a folder, a pattern such as data/*.parquet, or a list of these,
    with the columns messages, or prompt and completion, or text."""
    val_files: Any = None
    """Rows whose loss is the validation, in the same forms; null means none."""
    train_on: str = "assistant"
    """What is learned of a conversation: assistant (all assistant messages), last (the last of them), all (every token), or flag (messages
    with train: true)."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, for example {enable_thinking: false}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("data.train_on", self.train_on, TRAIN_ON)


@dataclass
class SampledConfig(SamplingConfig):
    """`sampled.*`: prompts that are answered and judged at each validation."""

    prefix: ClassVar[str] = "sampled"

    files: Any = None
    """Prompts with their ground truths, in the form that `lockstep ppo` takes; null means none."""
    max_prompt_length: int = 512
    """The longest prompt, in tokens."""
    max_response_length: int = 512
    """The longest response, in tokens."""
    max_samples: int = -1
    """Use at most this many prompts; -1 uses all."""
    batch_size: int | None = None
    """Prompts generated at once; null means all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_home(self, "files")
        file_names("sampled.files", self.files)
        all_or_at_least_one(self, "sampled", "max_samples")
        at_least(self, "sampled", 1, "max_prompt_length", "max_response_length", "batch_size")


@dataclass
class SFTConfig(StageConfig):
    """Everything a run of supervised fine-tuning needs to know."""

    command: ClassVar[str] = "lockstep sft"
    about: ClassVar[str] = "Learn from examples. It needs model.path and data.train_files."

    data: ExamplesConfig = field(default_factory=ExamplesConfig)
    sampled: SampledConfig = field(default_factory=SampledConfig)
    reward: JudgeConfig = field(default_factory=JudgeConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data.train_files:
            raise ConfigError(
                "data.train_files is empty; name a parquet, json or jsonl file with the columns messages, prompt and completion, or text",
                key="data.train_files",
            )
        self.check_longest("data.max_length", self.data.max_length)
        self.trainer.check_validated(bool(self.data.val_files or self.sampled.files))
