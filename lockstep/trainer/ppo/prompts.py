"""From the files to the scored responses of a step: prompts in the order of the schedule, and groups of responses to them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algorithms.shaping import has_signal
from lockstep.config.algorithm import FilterGroupsConfig
from lockstep.config.ppo import PPOConfig
from lockstep.data.encoder import Shown
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.data.schedule import PromptSchedule, batch_at
from lockstep.errors import ConfigError, RewardError
from lockstep.observability.metrics import Metric, merge_metrics, values
from lockstep.protocol import DataProto, Ragged
from lockstep.trainer.ppo.metrics import row_sums
from lockstep.trainer.ppo.rewards import Scored
from lockstep.trainer.ppo.stages import group_numbers
from lockstep.utils.files import load_object
from lockstep.utils.json_values import is_number


def open_dataset(config: PPOConfig, tokenizer: Any, files: Any, max_samples: int, shown: Shown | None = None) -> Any:
    """Return the rows of these files, in the dataset class that the config names.

    `shown` (`episodes.episode_prompt`) renders prompts as episodes begin with them, so that they are measured with the description of
    tools. A class with a constructor of its own does not get it.
    """
    custom = config.data.custom_cls
    cls = load_object(custom.path, str(custom.name)) if custom.path else RLHFDataset
    data = dataclasses.replace(config.data, seed=config.data_seed)
    if shown is not None and getattr(cls, "__init__", None) is RLHFDataset.__init__:
        return cls(files, tokenizer, data, max_samples, shown)
    return cls(files, tokenizer, data, max_samples)


def make_prompts(dataset: Any, positions: Sequence[int], n: int, pad_token_id: int) -> DataProto:
    """Return the dataset's rows at `positions`, each `n` times, with prompts, uid, sample and every column of the dataset."""
    if hasattr(dataset, "__getitems__"):  # torch's name for reading several items at once; RLHFDataset tokenises them together
        items = dataset.__getitems__(positions)
    else:
        items = [dataset[position] for position in positions]
    columns = {key: [item[key] for item in items] for key in items[0] if key != "prompt_ids"}
    prompts = Ragged.from_rows([item["prompt_ids"] for item in items], dtype=torch.int64)
    data = DataProto.from_dict({"prompts": prompts}, columns, {"pad_token_id": pad_token_id})
    data.non_tensor_batch["uid"] = np.array([str(i) for i in range(len(data))], dtype=object)
    data = data.repeat(n)
    data.non_tensor_batch["sample"] = np.array(list(range(n)) * len(items), dtype=object)
    return data


class Prompts:
    """Batches of training prompts in the order of the schedule, each prompt `n` times."""

    def __init__(self, dataset: Any, schedule: PromptSchedule, n: int, pad_token_id: int, left_out: Sequence[int]) -> None:
        """`left_out` is Run's: the numbers of batches to skip, which may grow."""
        self._dataset = dataset
        self._n = n
        self._pad_token_id = pad_token_id
        self._left_out = left_out
        self.schedule = schedule
        self.num_taken = 0
        """Batches taken so far: one per step, more with algorithm.filter_groups. A resume needs nothing else."""

    def next(self) -> tuple[DataProto, int]:
        """Return the next batch and its number, which counts from 1.

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


class Groups:
    """Collects `wanted` groups of `n` rows for a step.

    One batch of prompts is enough, unless `config` drops groups whose rewards are all equal (DAPO's dynamic sampling). Then batches are
    added until the remaining groups fill the step.
    """

    def __init__(self, config: FilterGroupsConfig, wanted: int, n: int, batches_per_epoch: int) -> None:
        self._config = config
        self._wanted = wanted
        self._n = n
        self._limit = (config.max_num_gen_batches or batches_per_epoch) if config.enable else 1
        self._num_batches = 0
        self._num_groups = 0
        self._num_with_signal = 0
        self._batches: list[DataProto] = []
        self._scored: list[Scored] = []
        self._metrics: list[dict[str, Metric]] = []

    @property
    def are_complete(self) -> bool:
        """Whether the step needs no further batch of prompts."""
        return self._num_groups >= self._wanted or self._num_batches >= self._limit

    def add(self, batch: DataProto, scored: Scored, metrics: dict[str, Metric]) -> None:
        """Keep the groups of a batch that the step can use. `metrics` are of all its rows."""
        self._num_batches += 1
        self._metrics.append(metrics)
        if self._config.enable:
            rows = rows_with_signal(batch, scored, self._config.metric)
            self._num_with_signal += len(rows) // self._n
            rows = rows[: (self._wanted - self._num_groups) * self._n]
            if not len(rows):
                return
            batch = batch.select_idxs(rows)
            scored = scored.select(rows.tolist())
        self._num_groups += len(batch) // self._n
        self._batches.append(batch)
        self._scored.append(scored)

    def join(self, say: Callable[[str], None]) -> tuple[DataProto, Scored, dict[str, float]]:
        """Return the chosen rows with token_level_scores, what else the judges said of them, and the metrics of all generated rows.

        Raise RewardError if no group was kept; tell the user if there are fewer than wanted.
        """
        metrics = values(merge_metrics(self._metrics))
        if not self._config.enable:
            return self._batches[0], self._scored[0], metrics
        if not self._batches:
            raise RewardError(
                f"{self._num_batches} batches of prompts gave no group whose responses differ in {self._config.metric!r}, so there is "
                "nothing to learn from: the task is too hard or too easy for this model, or its reward is constant (lockstep rewards "
                f"check); algorithm.filter_groups.max_num_gen_batches={self._config.max_num_gen_batches} limits the search"
            )
        if self._num_groups < self._wanted:
            say(
                f"{self._num_groups} of {self._wanted} groups have a signal after {self._num_batches} batches of prompts; the step goes "
                "on with these"
            )
        share = self._num_with_signal / (self._num_batches * self._wanted)
        metrics |= {"training/num_gen_batches": self._num_batches, "training/groups_with_signal": share}
        return DataProto.concat(self._batches), Scored.concat(self._scored), metrics


def rows_with_signal(batch: DataProto, scored: Scored, metric: str) -> Tensor:
    """Return the row numbers of the groups in which `metric` differs between samples; missing rewards do not count."""
    counted = (row_sums(batch, "response_mask") > 0) & torch.tensor([f is None for f in scored.failures])
    if metric == "score":
        numbers = torch.tensor(scored.total, dtype=torch.float64)
    elif metric == "seq_reward":
        numbers = row_sums(batch, "token_level_scores")
    elif metric in scored.extra:
        said = scored.extra[metric]
        lacking = [i for i, value in enumerate(said) if counted[i] and not is_number(value)]
        if lacking:
            raise RewardError(
                f"algorithm.filter_groups.metric={metric} is not a number in {len(lacking)} rows: {said[lacking[0]]!r}"
            )
        numbers = torch.tensor([float(value) if counted[i] else 0.0 for i, value in enumerate(said)], dtype=torch.float64)
    else:
        raise ConfigError(
            f"algorithm.filter_groups.metric={metric} is not among what the reward function returned: "
            f"{', '.join(scored.extra) or 'nothing'}; choose score, seq_reward or one of these"
        )
    return has_signal(numbers, group_numbers(batch), counted).nonzero().flatten()
