"""Ranks that compute the same rows: each brings its own, all get all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch.distributed as dist

from lockstep.protocol import DataProto


def join_rows(data: DataProto, group: dist.ProcessGroup | None) -> tuple[DataProto, Sequence[int]]:
    """The rows of all ranks of `group` in the order of its ranks, and which of them this rank brought. Without a group: its own."""
    if group is None:
        return data, range(len(data))
    parts: list[DataProto] = [None] * group.size()  # type: ignore[list-item]
    dist.all_gather_object(parts, data, group=group)
    ends = list(accumulate(len(part) for part in parts))
    rank = group.rank()
    return DataProto.concat([part for part in parts if len(part)] or parts[:1]), range(ends[rank] - len(data), ends[rank])
