"""Which rows a rank computes, and when: it joins those of its model group, and packs the next micro-batch while the device works."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from lockstep.protocol import DataProto

T = TypeVar("T")


class LazySequence(Sequence[T], Generic[T]):
    """The items `make(0)` to `make(length - 1)`. Each is made when it is first read, and then kept."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._numbers, self._make = range(length), cache(make)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        number = self._numbers[index]
        return self._make(number) if isinstance(number, int) else [self._make(i) for i in number]


def join_rows(data: DataProto, group: dist.ProcessGroup | None) -> tuple[DataProto, Sequence[int]]:
    """The rows of all ranks of `group` in the order of its ranks, and which of them this rank brought. Without a group: its own."""
    if group is None:
        return data, range(len(data))
    parts: list[DataProto] = [None] * group.size()  # type: ignore[list-item]
    dist.all_gather_object(parts, data, group=group)
    ends = list(accumulate(len(part) for part in parts))
    rank = group.rank()
    return DataProto.concat([part for part in parts if len(part)] or parts[:1]), range(ends[rank] - len(data), ends[rank])
