"""From files to the prompts of a step."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.config.ppo import PPOConfig
from lockstep.data.encoder import Shown
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.data.schedule import PromptSchedule, batch_at
from lockstep.protocol import DataProto
from lockstep.trainer.ppo.stages import make_prompts
from lockstep.utils.files import load_object


def open_dataset(config: PPOConfig, tokenizer: Any, files: Any, max_samples: int, shown: Shown | None = None) -> Any:
    """The rows of these files, in the dataset class that the config names.

    `shown` (`episodes.episode_prompt`) renders prompts as episodes begin with them, so that they are measured with the description of
    tools. A class with a constructor of its own is not given it.
    """
    custom = config.data.custom_cls
    cls = load_object(custom.path, str(custom.name)) if custom.path else RLHFDataset
    data = dataclasses.replace(config.data, seed=config.data_seed)
    if shown is not None and getattr(cls, "__init__", None) is RLHFDataset.__init__:
        return cls(files, tokenizer, data, max_samples, shown)
    return cls(files, tokenizer, data, max_samples)


class Prompts:
    """Batches of training prompts in the order of the schedule, each prompt `n` times."""

    def __init__(self, dataset: Any, schedule: PromptSchedule, n: int, pad_token_id: int, left_out: Sequence[int]) -> None:
        """`left_out` is Run's: the numbers of batches that are not taken, which may grow."""
        self._dataset, self.schedule, self._n, self._pad_token_id = dataset, schedule, n, pad_token_id
        self._left_out = left_out
        self.num_taken = 0
        """Batches taken so far: one per step, more with algorithm.filter_groups. All there is to save for a resume."""

    def next(self) -> tuple[DataProto, int]:
        """The next batch and its number, which counts from 1.

        In the sampling key the number stands for the step: a prompt may come twice in a step, but never in a batch.
        """
        self.num_taken += 1
        number = self.number
        batch = make_prompts(self._dataset, self.schedule.batch(number - 1), self._n, self._pad_token_id)
        batch.non_tensor_batch["uid"] = np.array([f"{number}.{uid}" for uid in batch.non_tensor_batch["uid"]], dtype=object)
        return batch, number

    @property
    def number(self) -> int:
        """The number of the last batch, from 1."""
        return batch_at(self.num_taken - 1, self._left_out) + 1

    @property
    def epoch(self) -> int:
        """The epoch of the last batch."""
        return self.schedule.epoch(self.number - 1)
