"""AdamW's moments of a model that FSDP or FSDP2 shards, as whole tensors.

FSDP1 has a run of a parameter's numbers on each rank, in the order of the ranks; on many ranks it has none of them.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lockstep.models.weight_files import TensorSpec
from lockstep.workers.engine import moments
from lockstep.workers.engine.fsdp.sharded_model import hf_name
from lockstep.workers.engine.moments import Named, moment_of
from lockstep.workers.engine.sharded import ReadRows, whole_tensor

Specs = Mapping[str, TensorSpec]


def learning_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Hugging Face name -> this rank's part of each parameter that learns."""
    return {hf_name(name): parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def whole_moments(
    module: nn.Module, optimizer: torch.optim.Optimizer, kind: str, specs: Specs, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of a moment of every parameter that learns, one at a time. A collective."""
    parameters = learning_parameters(module)
    if isinstance(module, FullyShardedDataParallel):
        runs = _runs(module, parameters, device)
        for name, parameter in parameters.items():
            part = moment_of(optimizer, parameter, kind).to(device).flatten()
            yield name, _join(part, runs[name], module).view(specs[name][1])
    else:
        for name, parameter in parameters.items():
            yield name, whole_tensor(moment_of(optimizer, parameter, kind).to(device))


def read_moments(
    module: nn.Module, optimizer: torch.optim.Optimizer, kind: str, read: ReadRows, specs: Specs, device: torch.device
) -> None:
    """Replace a moment; each rank keeps its part. A collective."""
    parameters = learning_parameters(module)
    if not isinstance(module, FullyShardedDataParallel):
        moments.read_moments(optimizer, parameters, kind, read)
        return
    runs, rank = _runs(module, parameters, device), dist.get_rank(module.process_group)
    for name, parameter in parameters.items():
        if runs[name][rank]:
            start = sum(runs[name][:rank])
            whole = read(name, 0, specs[name][1][0]).flatten()
            optimizer.state[parameter][kind] = whole[start : start + runs[name][rank]].to(device)


def _runs(module: FullyShardedDataParallel, parameters: Named, device: torch.device) -> dict[str, list[int]]:
    """How many numbers of each parameter each rank of a copy of the model has, in order."""
    own = torch.tensor([parameter.numel() for parameter in parameters.values()], device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(module.process_group))]
    dist.all_gather(found, own, group=module.process_group)
    return dict(zip(parameters, torch.stack(found, dim=1).tolist(), strict=True))


def _join(part: Tensor, run: list[int], module: FullyShardedDataParallel) -> Tensor:
    padded = part.new_zeros(max(run))  # gloo gathers equal sizes only
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in run]
    dist.all_gather(parts, padded, group=module.process_group)
    return torch.cat([found[:size] for found, size in zip(parts, run, strict=True)])
