"""PromptSchedule: which prompts a step takes, as a function of the step number alone."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import ConfigError


@dataclass(frozen=True)
class PromptSchedule:
    """The order of prompts. There is no state: a resumed run needs only the step number.

    An epoch visits `steps_per_epoch * batch_size` different rows; with `shuffle` its order depends on (seed, epoch)
    and nothing else, so the rows that do not fill a last batch are others every epoch.

    Raises ConfigError when a batch does not fit into the rows.
    """

    num_rows: int
    batch_size: int
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.num_rows:
            raise ConfigError(
                f"data.train_batch_size={self.batch_size} must be between 1 and the number of rows, {self.num_rows}: "
                "lower it, or give more data",
                key="data.train_batch_size",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in the data; a last partial batch is dropped."""
        return self.num_rows // self.batch_size

    def epoch(self, step: int) -> int:
        """The epoch of a step; both count from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int) -> list[int]:
        """The `batch_size` row positions of a step, which counts from 0 over all epochs."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        start = step % self.steps_per_epoch * self.batch_size
        if not self.shuffle:
            return list(range(start, start + self.batch_size))
        return _order(self.num_rows, self.seed, self.epoch(step))[start : start + self.batch_size].tolist()


def batch_at(position: int, left_out: Sequence[int]) -> int:
    """The number of the batch, from 0, that comes after `position` others: those that are `left_out` (sorted) do not count."""
    for number in left_out:
        position += number <= position
    return position


@functools.lru_cache(maxsize=2)  # an epoch of a million rows takes 30 ms, and is asked for by every step
def _order(num_rows: int, seed: int, epoch: int) -> Tensor:
    # Hashed, because torch's CPU generator uses only the low 32 bits of its seed, and because seed + epoch would give
    # epoch 1 of seed 0 the order of epoch 0 of seed 1.
    digest = hashlib.blake2b(f"{seed},{epoch}".encode(), digest_size=4).digest()
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little")))
