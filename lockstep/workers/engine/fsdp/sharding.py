"""Sharding a model with one of the two versions of FSDP, filling it, and what a rank has of it.

FSDP1 is FullyShardedDataParallel, FSDP2 is fully_shard, both for several ranks; one rank keeps the model whole (whole_model.py).
(FSDP1's `sync_module_states` raises on a CPU with torch 2.13: every rank reads the same weights instead.)
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from transformers import PreTrainedModel

from lockstep.config.engine import FSDPConfig
from lockstep.models.fast_layers import takes_float_residual
from lockstep.models.scores import ScoreLayer
from lockstep.models.weight_files import WeightSource
from lockstep.workers.engine.fsdp.sharded_model import all_names, hf_name, own_logits, reshard, saved_buffers, whole_units
from lockstep.workers.engine.fsdp.tensor_parallel import split_layers
from lockstep.workers.engine.fsdp.whole_model import keep_whole
from lockstep.workers.engine.sharded import ReadRows, local_part, read_shards

_STRATEGIES = {
    (1, True): ShardingStrategy.FULL_SHARD,
    (1, False): ShardingStrategy.SHARD_GRAD_OP,
    (2, True): ShardingStrategy.HYBRID_SHARD,
    (2, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
}
"""FSDP1's name for (dimensions of the mesh: all ranks in a row, or copies x ranks of one copy; whether layers are freed after use)."""


@dataclass(frozen=True)
class Meshes:
    """How the ranks are laid out: those that share layers next to each other."""

    data: DeviceMesh
    """What shards are spread over: all data ranks in a row, or copies x ranks of one copy."""
    tensor: DeviceMesh | None
    """The ranks that share every layer with this one."""


def make_meshes(config: FSDPConfig, device: torch.device) -> Meshes:
    """The layout of all ranks. That it is possible is for `check` to say."""
    tensor, world = config.tensor_parallel_size, dist.get_world_size()
    ranks = world // tensor
    sizes = {"shard": ranks}
    if config.fsdp_size not in (-1, ranks):
        sizes = {"copy": ranks // config.fsdp_size, "shard": config.fsdp_size}
    data = tuple(sizes)
    sizes |= {"tensor": tensor} if tensor > 1 else {}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return Meshes(mesh, None) if tensor == 1 else Meshes(mesh[data], mesh["tensor"])


def shard(
    model: PreTrainedModel,
    version: int,
    dtype: torch.dtype,
    config: FSDPConfig,
    meshes: Meshes,
    device: torch.device,
    source: WeightSource | None = None,
) -> nn.Module:
    """Shard the model layer by layer; one rank keeps it whole. Parameters stay float32; computation runs in `dtype`, of a score layer in
    float32.

    `source` gives its weights to a model on the meta device: no rank ever holds all of them.
    """
    reshard_after_forward = config.reshard_after_forward
    layers = {type(m) for m in model.modules() if type(m).__name__ in set(model._no_split_modules or ())}
    if dist.get_world_size() == 1:
        assert source is None, "one rank keeps the model that was loaded"
        for parameter in model.parameters():  # a map of the file that it was loaded from can be neither freed nor trusted to stay
            parameter.data = parameter.data.to(device, copy=True)
        return keep_whole(model.to(device), dtype, layers)  # type: ignore[arg-type]
    if version == 1:
        assert source is not None, "FSDP1 shards a model on the meta device"
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda m: type(m) in layers or (isinstance(m, ScoreLayer) and {"mixed_precision": None})),
            sharding_strategy=_STRATEGIES[meshes.data.ndim, reshard_after_forward],
            device_mesh=meshes.data if meshes.data.ndim > 1 else None,
            mixed_precision=None if dtype == torch.float32 else MixedPrecision(dtype, torch.float32, torch.float32),
            device_id=device,
            use_orig_params=True,
            param_init_fn=_materialise(device),
        )
        _fill_parameters(wrapped, source.read, all_names)
        return wrapped
    if source is None:
        model = model.to(device)  # type: ignore[arg-type]
    mesh = meshes.data
    if meshes.tensor is not None:
        split_layers(model, meshes.tensor)
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    for module in model.modules():
        if type(module) in layers or isinstance(module, ScoreLayer):
            own = dataclasses.replace(policy, cast_forward_inputs=not takes_float_residual(module))
            own = MixedPrecisionPolicy() if isinstance(module, ScoreLayer) else own
            fully_shard(module, mesh=mesh, mp_policy=own, reshard_after_forward=reshard_after_forward)
    model.register_forward_hook(own_logits)  # before FSDP's own hook, which looks at the output
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    if source is not None:
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
        _fill_parameters(model, source.read, all_names)
    return model


def _materialise(device: torch.device) -> Callable[[nn.Module], None]:
    """For FSDP1, which calls it for each module of a unit and shards the unit right after: gives a module memory for its parameters.
    A tied parameter stays one."""
    made: dict[nn.Parameter, nn.Parameter] = {}

    def materialise(module: nn.Module) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                module._parameters[name] = made[parameter]

    return materialise


@torch.no_grad()
def fill(module: nn.Module, read: ReadRows, chosen: Callable[[str], bool] = all_names) -> None:
    """Overwrite the `chosen` parameters and saved buffers with the rows that `read(name, start, stop)` gives, part by part."""
    _fill_parameters(module, read, chosen)
    for name, buffer in saved_buffers(module):
        if chosen(name):
            buffer.copy_(read(name, 0, len(buffer) if buffer.dim() else 1))


@torch.no_grad()
def _fill_parameters(module: nn.Module, read: ReadRows, chosen: Callable[[str], bool]) -> None:
    if isinstance(module, FullyShardedDataParallel):
        for name, parameter in whole_units(module, writeback=True):
            if chosen(name):
                parameter.copy_(read(name, 0, len(parameter)))
    else:
        reshard(module)
        read_shards(((name, p) for name, p in module.named_parameters() if chosen(name)), read)


def shards(module: nn.Module) -> Iterator[Tensor]:
    """What this rank keeps of the parameters; layers that FSDP2 still holds gathered are dropped."""
    reshard(module)
    if not isinstance(module, FullyShardedDataParallel):
        yield from map(local_part, module.parameters())
        return
    for part in module.modules():
        if isinstance(part, FullyShardedDataParallel) and part._handle is not None:
            yield getattr(part._handle.flat_param, "_local_shard", part._handle.flat_param)


def gradient_shards(module: nn.Module) -> Iterator[Tensor]:
    """The gradients that wait for the optimizer, as far as this rank has them."""
    yield from (local_part(parameter.grad) for parameter in module.parameters() if parameter.grad is not None)


def own_gradients(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, gradient) of every trained parameter on ONE rank; zeros where the last backward passes left none."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield hf_name(name), local_part(gradient).detach()
