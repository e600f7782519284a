"""The rows of a dataset as padded tensors, for a loop of one's own that wants blocks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from lockstep.config.data import DataConfig
from lockstep.data.schedule import PromptSchedule


class PaddedRows(Dataset[dict[str, Any]]):
    """`dataset` with input_ids, attention_mask and position_ids, `width` wide and padded on the left, and raw_prompt_ids for prompt_ids."""

    def __init__(self, dataset: Any, pad_token_id: int, width: int) -> None:
        self._dataset = dataset
        self._pad = pad_token_id
        self._width = width

    def __getitem__(self, position: int) -> dict[str, Any]:
        row = dict(self._dataset[position])
        ids = row.pop("prompt_ids")
        padding = self._width - len(ids)
        mask = torch.tensor([0] * padding + [1] * len(ids))
        blocks = {"input_ids": torch.tensor([self._pad] * padding + ids), "attention_mask": mask, "raw_prompt_ids": ids}
        return row | blocks | {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


class RestOfEpoch:
    """The batches that are left of an epoch; `prompts` counts those that were taken (`num_taken`)."""

    def __init__(self, schedule: PromptSchedule, prompts: Any) -> None:
        self._schedule = schedule
        self._prompts = prompts

    def __len__(self) -> int:
        return self._schedule.steps_per_epoch

    def __iter__(self) -> Iterator[Sequence[int]]:
        for _ in range(self._prompts.num_taken % len(self), len(self)):
            self._prompts.num_taken += 1
            yield self._schedule.batch(self._prompts.num_taken - 1)


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One batch of rows: tensors stacked, everything else as an object array."""
    columns = {name: np.fromiter((row[name] for row in data_list), dtype=object) for name in data_list[0]}
    return {name: torch.stack(list(values)) if isinstance(values[0], Tensor) else values for name, values in columns.items()}


def prompt_loader(
    dataset: Any,
    prompts: Any,
    size: int,
    config: DataConfig,
    seed: int,
    pad_token_id: int,
    sampler: Any = None,
    collate: Any = None,
) -> DataLoader[Any]:
    """Batches of padded rows, in the trainer's own order, which goes on after a resume, unless the sampler is of a class of one's own."""
    batches: Any = BatchSampler(sampler or (), size, drop_last=True)
    if type(sampler) in (type(None), RandomSampler, SequentialSampler):
        batches = RestOfEpoch(PromptSchedule(len(dataset), size, config.shuffle, seed), prompts)
    rows = PaddedRows(dataset, pad_token_id, config.max_prompt_length)
    return DataLoader(rows, batch_sampler=batches, collate_fn=collate or collate_fn)
