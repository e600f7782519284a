"""Sequence parallelism (Ulysses): how the tokens of a micro-batch are divided among the ranks of a group, and what that asks of a model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lockstep.errors import ConfigError
from lockstep.models.packing import PackedRows
from lockstep.models.ulysses import gather_columns


def check_sequence_ranks(size: int, hf_config: Any, world_size: int, key: str) -> None:
    """Raise ConfigError where the ranks do not divide into groups of `size`, or the model's heads into so many parts. `key` is the
    config key that says `size`."""
    if world_size % size:
        raise ConfigError(
            f"{key}={size} must divide the {world_size} ranks: each group of that many divides the tokens of a micro-batch"
        )
    heads = hf_config.get_text_config().num_attention_heads
    if heads % size:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0 and world_size % n == 0]
        raise ConfigError(
            f"{key}={size} must divide the model's {heads} attention heads, which the ranks of a group share out among them; "
            f"choose one of {divisors}"
        )


def sequence_group(size: int, device: torch.device) -> dist.ProcessGroup | None:
    """The group of `size` neighbouring ranks that this one is in; None where it would be alone."""
    if size == 1:
        return None
    mesh = init_device_mesh(device.type, (dist.get_world_size() // size, size), mesh_dim_names=("data", "sequence"))
    return mesh.get_group("sequence")


def compute_divided(
    packed: PackedRows, group: dist.ProcessGroup, compute: Callable[[PackedRows], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The columns [M] of a micro-batch, each rank computing those entries whose tokens it has.

    The N tokens are cut into equal parts in order, filled up at the end with tokens that nothing reads. `compute` gives the columns of
    this rank's part.
    """
    ranks = group.size()
    rank = group.rank()
    total = packed.input_ids.shape[1]
    size = -(-total // ranks)
    own = slice(rank * size, (rank + 1) * size)
    fill = (0, ranks * size - total)
    owner = packed.predict_at // size
    by_rank = owner[:, None] == torch.arange(ranks, device=owner.device)  # [M, W]
    number = (by_rank.cumsum(0) - 1)[by_rank]  # of each entry among those of its rank
    most = int(by_rank.sum(0).max())
    mine = by_rank[:, rank].nonzero().flatten()
    part = replace(
        packed,
        input_ids=F.pad(packed.input_ids, fill)[:, own],
        position_ids=F.pad(packed.position_ids, fill)[:, own],
        layout=packed.layout.divided(group),
        predict_at=packed.predict_at[mine] - rank * size,
        targets=packed.targets[mine] if len(packed.targets) else packed.targets,  # scored rows have none
    )
    return {name: gather_columns(column, most, owner * most + number, group) for name, column in compute(part).items()}
