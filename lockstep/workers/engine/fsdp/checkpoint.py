"""What a checkpoint has of a sharded model besides its weights: AdamW's moments as whole tensors, and adapters (LoRA).

FSDP1 has a run of a parameter's numbers on each rank, in the order of the ranks; on many ranks it has none of them.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lockstep.config.engine import ADAPTER_WEIGHTS
from lockstep.errors import DataError
from lockstep.models.lora import ADAPTER, Lora, adapter_name, base_name
from lockstep.models.weight_files import WeightFiles, write_weights
from lockstep.workers.engine.checkpoint import Specs
from lockstep.workers.engine.dtensor import ReadRows, whole_tensor
from lockstep.workers.engine.fsdp.sharding import fill, hf_name, whole_tensors
from lockstep.workers.engine.optim import Named, moment_of, read_sharded_moments


def learning_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Hugging Face name -> this rank's part of each parameter that learns."""
    return {hf_name(name): parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def export_moments(
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


def load_moments(
    module: nn.Module, optimizer: torch.optim.Optimizer, kind: str, read: ReadRows, specs: Specs, device: torch.device
) -> None:
    """Replace a moment; each rank keeps its part. A collective."""
    parameters = learning_parameters(module)
    if not isinstance(module, FullyShardedDataParallel):
        read_sharded_moments(optimizer, parameters, kind, read)
        return
    runs = _runs(module, parameters, device)
    rank = dist.get_rank(module.process_group)
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


def save_adapter(module: nn.Module, lora: Lora, folder: Path, *, writes: bool) -> None:
    """A folder that peft loads beside the model that training started from. Adapters are small: the first rank holds them all."""
    trained = set(lora.trained)
    tensors = {adapter_name(name): tensor for name, tensor in whole_tensors(module, trained.__contains__)}
    if writes:
        folder.mkdir(exist_ok=True)
        lora.save_config(folder)
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_weights(folder / ADAPTER_WEIGHTS, specs, tensors.items())


def open_adapter(lora: Lora, path: Path) -> WeightFiles:
    """The adapters of a checkpoint. Raises DataError where it has none, or others."""
    if not (path / ADAPTER / ADAPTER_WEIGHTS).is_file():
        raise DataError(f"{path} has no adapter: it was trained with model.lora_rank=0; resume it with that")
    files = WeightFiles(path / ADAPTER, ADAPTER_WEIGHTS)
    for name, value in lora.values.items():
        found = files.shapes.get(adapter_name(name))
        if found != tuple(value.shape):
            raise DataError(
                f"{path} has other adapters: {name} has shape {found or 'none'} instead of {tuple(value.shape)}; resume with the "
                "model.lora_rank and model.target_modules that wrote it"
            )
    return files


def load_adapter(module: nn.Module, lora: Lora, path: Path, merged: WeightFiles) -> None:
    """The adapters. The model itself stays as it was loaded; that it is the one they were trained beside shows in its norms."""
    files = open_adapter(lora, path)
    vectors = {name for name, shape in merged.shapes.items() if len(shape) == 1} - set(lora.trained)
    for name, tensor in whole_tensors(module, lambda name: base_name(name) in vectors):
        if not torch.equal(tensor.float().cpu(), merged.read(base_name(name), 0, len(tensor))):
            raise DataError(
                f"{path} was trained beside another model: {base_name(name)} differs; set model.path to the one it started from"
            )
    trained = set(lora.trained)
    fill(module, lambda name, start, stop: files.read(adapter_name(name), start, stop), trained.__contains__)
