"""`data.*`: where prompts come from and how they become batches."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from lockstep.config.check import all_or_at_least_one, at_home, at_least, file_names, one_of

EMBEDDED = "embedded"
"""The value of data.train_files and actor_rollout_ref.model.path that stands for the task and the model shipped with the package."""


@dataclass
class CustomClassConfig:
    """A dataset class of your own."""

    path: str | None = None
    """A Python file with a dataset class of your own; null uses RLHFDataset."""
    name: str | None = None
    """The class in that file; its constructor takes (data_files, tokenizer, config, max_samples)."""

    def __post_init__(self) -> None:
        at_home(self, "path")


@dataclass
class DataConfig:
    """Prompts: their files, their lengths, how many a step takes."""

    given: ClassVar[frozenset[str] | None] = None
    """All keys that the user set, on the instance of a configuration that was read from keys: the other sizes follow (follow.py). None: all
    are the user's."""

    train_files: Any = EMBEDDED
    """Prompts to train on: a file (parquet, json, jsonl), a folder of such files, a pattern such as data/*.parquet, a list of these, or
    'embedded'."""
    val_files: Any = None
    """Prompts to validate on, in the same forms; null means no validation (with 'embedded', the embedded ones)."""
    prompt_key: str = "prompt"
    """The column that holds the prompt: a string, or a list of {role, content}."""
    max_prompt_length: int = 512
    """The longest prompt, in tokens."""
    max_response_length: int = 512
    """The longest response, in tokens."""
    train_batch_size: int = 64
    """Prompts a step."""
    val_batch_size: int | None = None
    """Prompts generated at once in validation; null means all of them."""
    shuffle: bool = True
    """Visit the training prompts in a new order each epoch."""
    seed: int | None = None
    """Seed of that order; null uses trainer.seed."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than max_prompt_length, and say how many."""
    truncation: str = "error"
    """What happens to a prompt that is too long: error, left (keep the end), right (keep the start), middle (keep both ends)."""
    train_max_samples: int = -1
    """Use at most this many training prompts; -1 uses all."""
    val_max_samples: int = -1
    """Use at most this many validation prompts; -1 uses all."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the tokenizer's chat template, for example {enable_thinking: false}."""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)

    def __post_init__(self) -> None:
        at_home(self, "train_files", "val_files")
        if self.custom_cls.path is None:  # a class of the user's own reads what it likes
            file_names("data.train_files", self.train_files)
            file_names("data.val_files", self.val_files)
        all_or_at_least_one(self, "data", "train_max_samples", "val_max_samples")
        one_of("data.truncation", self.truncation, ("error", "left", "right", "middle"))
        at_least(self, "data", 1, "max_prompt_length", "max_response_length", "train_batch_size", "val_batch_size")
