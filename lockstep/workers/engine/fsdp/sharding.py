"""The two versions of FSDP, as the few operations in which they differ.

Traps that are handled here, all seen on CPU with torch 2.13: FSDP1's `sync_module_states` raises (every rank loads the same weights
instead); its FULL_SHARD on one rank warns and falls back (NO_SHARD is asked for outright); a full state dict with CPU offload of a CPU
model is a segmentation fault (weights are gathered one unit at a time instead); HYBRID_SHARD over groups of one rank reduces no gradient
and says nothing (NO_SHARD over all ranks is asked for). FSDP2 hangs its pre-backward hook on the model's
outputs and warns about one that is a view, which a head with a bias returns (`own_logits` makes it a tensor of its own).
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from lockstep.config.engine import FSDPConfig
from lockstep.models.fast_layers import takes_float_residual
from lockstep.models.meta import WeightSource
from lockstep.workers.engine.fsdp.tensor_parallel import split_layers

T = TypeVar("T", bound=Tensor)


@dataclass(frozen=True, slots=True)
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
    if tensor == 1:
        return Meshes(init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)), None)
    names = (*sizes, "tensor")
    mesh = init_device_mesh(device.type, (*sizes.values(), tensor), mesh_dim_names=names)
    return Meshes(mesh[tuple(sizes)], mesh["tensor"])


def shard(
    model: PreTrainedModel,
    version: int,
    dtype: torch.dtype,
    config: FSDPConfig,
    meshes: Meshes,
    device: torch.device,
    source: WeightSource | None = None,
) -> nn.Module:
    """Shard the model layer by layer. Parameters stay float32; computation runs in `dtype`.

    `source` gives its weights to a model on the meta device: no rank ever holds all of them.
    """
    # One rank has every weight anyway; what it would free and make again is the copy in the type of the computation.
    reshard_after_forward = config.reshard_after_forward and dist.get_world_size() > 1
    layers = {type(m) for m in model.modules() if type(m).__name__ in set(model._no_split_modules or ())}
    if source is None:
        model = model.to(device)  # type: ignore[arg-type]
    if version == 1:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers),
                **_strategy(meshes.data, reshard_after_forward),
                mixed_precision=None if dtype == torch.float32 else MixedPrecision(dtype, torch.float32, torch.float32),
                device_id=device,
                use_orig_params=True,
                param_init_fn=None if source is None else _reader(model, source, device),
            )
    mesh = meshes.data
    if meshes.tensor is not None:
        split_layers(model, meshes.tensor)
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    for module in model.modules():
        if type(module) in layers:
            own = dataclasses.replace(policy, cast_forward_inputs=not takes_float_residual(module))
            fully_shard(module, mesh=mesh, mp_policy=own, reshard_after_forward=reshard_after_forward)
    model.register_forward_hook(own_logits)  # before FSDP's own hook, which looks at the output
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    if source is not None:
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
        read_shards(model, source.read, _all)
    return model


def _reader(model: PreTrainedModel, source: WeightSource, device: torch.device) -> Callable[[nn.Module], None]:
    """For FSDP1, which calls it for each module of a unit and shards the unit right after: gives a module its whole weights."""
    named = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
    slots = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    tied: dict[int, nn.Parameter] = {}

    def fill(module: nn.Module) -> None:
        for attribute, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            name, _ = named[id(parameter)]
            filled = tied.get(id(parameter))
            if filled is None:
                value = source.read(name, 0, len(parameter)).to(device)
                filled = nn.Parameter(value, requires_grad=parameter.requires_grad)
            if slots[id(parameter)] > 1:
                tied[id(parameter)] = filled
            module._parameters[attribute] = filled

    return fill


@torch.no_grad()
def read_shards(module: nn.Module, read: Callable[[str, int, int], Tensor], chosen: Callable[[str], bool]) -> None:
    """Fill the `chosen` parameters of a model that FSDP2 sharded: each rank asks `read(name, start, stop)` for the rows of its shards."""
    reshard(module)
    for name, parameter in module.named_parameters():
        if not chosen(name):
            continue
        assert isinstance(parameter, DTensor)
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        local = parameter.to_local()
        if local.numel():
            rows = read(name, offset[0], offset[0] + len(local))
            local.copy_(rows if local.dim() < 2 else rows[:, offset[1] : offset[1] + local.shape[1]])


def _strategy(mesh: DeviceMesh, reshard_after_forward: bool) -> dict[str, Any]:
    """FSDP1's arguments for all ranks in a row, for copies x ranks of one copy, or for a copy on every rank."""
    if mesh.size(mesh.ndim - 1) == 1:
        return {"sharding_strategy": ShardingStrategy.NO_SHARD}
    if mesh.ndim == 1:
        return {"sharding_strategy": ShardingStrategy.FULL_SHARD if reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP}
    hybrid = ShardingStrategy.HYBRID_SHARD if reshard_after_forward else ShardingStrategy._HYBRID_SHARD_ZERO2
    return {"sharding_strategy": hybrid, "device_mesh": mesh}


def own_logits(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that makes the model's logits a tensor of their own where they are a view."""
    logits = getattr(output, "logits", None)  # none where hidden states were handed out
    if logits is not None and logits.requires_grad and logits._is_view():
        output.logits = logits.clone()


def reshard(module: nn.Module) -> None:
    """Free what forward passes without a backward pass have gathered: it would not follow the next update."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def gradient_sync(module: nn.Module, enabled: bool, keep_gathered: bool) -> Iterator[None]:
    """Reduce gradients over the ranks in backward passes inside, or only add them up locally.

    With `keep_gathered` whole parameters stay until the pass that reduces (FSDP2): the passes before it gather nothing again.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
        module.set_reshard_after_backward(enabled or not keep_gathered)
        yield
    elif enabled:
        yield
    else:
        assert isinstance(module, FullyShardedDataParallel)
        with module.no_sync():
            yield


def clip_grad_norm(module: nn.Module, max_norm: float) -> float:
    """Scale the whole gradient down to `max_norm`; returns its norm before."""
    if isinstance(module, FullyShardedDataParallel):
        return float(module.clip_grad_norm_(max_norm))
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    total = _norm(gradients)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        _local(gradient).mul_(scale)
    return float(total)


def _norm(tensors: list[Tensor]) -> Tensor:
    """The norm of all tensors together, in float32. Some may be split along other dimensions of the ranks than others (torch's own
    functions do not mix them): squares are summed here, then over the dimensions along which each is split."""
    squares: dict[tuple[tuple[DeviceMesh, int], ...], Tensor] = {}
    for tensor in tensors:
        split: tuple[tuple[DeviceMesh, int], ...] = ()
        if isinstance(tensor, DTensor):
            split = tuple((tensor.device_mesh, dim) for dim, where in enumerate(tensor.placements) if not where.is_replicate())
        square = _local(tensor).float().square().sum()
        squares[split] = squares[split] + square if split in squares else square
    for split, square in squares.items():
        for mesh, dim in split:
            dist.all_reduce(square, group=mesh.get_group(dim))
    return torch.stack(list(squares.values())).sum().sqrt()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: DTensor) -> Tensor:
    """The whole tensor, gathered along one dimension of the ranks after the other; as it is where this rank has all of it."""
    placements = list(tensor.placements)
    for dim in range(len(placements) if tensor.device_mesh.size() > 1 else 0):
        placements[dim] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """The tensors in groups, each of one device mesh (or none)."""
    groups: dict[DeviceMesh | None, list[T]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def _all(name: str) -> bool:
    return True


def whole_tensors(module: nn.Module, chosen: Callable[[str], bool] = _all) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of the `chosen` parameters and saved buffers. A collective: every rank takes all of them.

    What is sharded is gathered one parameter (FSDP2) or one layer (FSDP1) at a time. A parameter that this rank has whole is given as
    it is, not as a copy.
    """
    if isinstance(module, FullyShardedDataParallel):
        for unit, names in _units(module):
            with _whole_unit(unit, writeback=False):
                for name, parameter in names():
                    if chosen(name):
                        yield name, parameter.detach() if _is_whole(unit) else parameter.detach().clone()
    else:
        reshard(module)
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor)
            if chosen(name):
                yield name, _whole(parameter).detach()
    yield from ((name, buffer) for name, buffer in saved_buffers(module) if chosen(name))


@torch.no_grad()
def fill(module: nn.Module, read: Callable[[str, int, int], Tensor], chosen: Callable[[str], bool] = _all) -> None:
    """Overwrite the `chosen` parameters and saved buffers with the rows that `read(name, start, stop)` gives, part by part."""
    if isinstance(module, FullyShardedDataParallel):
        for unit, names in _units(module):
            with _whole_unit(unit, writeback=True):
                for name, parameter in names():
                    if chosen(name):
                        parameter.copy_(read(name, 0, len(parameter)))
    else:
        read_shards(module, read, chosen)
    for name, buffer in saved_buffers(module):
        if chosen(name):
            buffer.copy_(read(name, 0, len(buffer) if buffer.dim() else 1))


NamedParameters = Callable[[], Iterator[tuple[str, nn.Parameter]]]


def _units(module: FullyShardedDataParallel) -> Iterator[tuple[FullyShardedDataParallel, NamedParameters]]:
    """Each part of the model that FSDP1 gathers at once, the root first, and what names its parameters while it is gathered."""
    for prefix, unit in module.named_modules():
        if isinstance(unit, FullyShardedDataParallel):
            yield unit, functools.partial(_own_parameters, unit, prefix)


def _own_parameters(unit: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter) of a unit without those of the units inside it; a tied one comes once."""
    inside = {id(p) for m in unit.modules() if m is not unit and isinstance(m, FullyShardedDataParallel) for p in m.parameters()}
    for name, parameter in unit.named_parameters(prefix=prefix):
        if id(parameter) not in inside:
            yield _hf_name(name), parameter


def _is_whole(unit: FullyShardedDataParallel) -> bool:
    return unit.sharding_strategy is ShardingStrategy.NO_SHARD


def _whole_unit(unit: FullyShardedDataParallel, writeback: bool) -> AbstractContextManager[None]:
    if _is_whole(unit):
        return nullcontext()
    return FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=writeback)


def _hf_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def shards(module: nn.Module) -> Iterator[Tensor]:
    """What this rank keeps of the parameters; layers that FSDP2 still holds gathered are dropped."""
    reshard(module)
    for part in module.modules():
        if isinstance(part, FullyShardedDataParallel) and part._handle is not None:
            yield getattr(part._handle.flat_param, "_local_shard", part._handle.flat_param)
    yield from (_local(parameter) for parameter in module.parameters() if isinstance(parameter, DTensor))


def gradient_shards(module: nn.Module) -> Iterator[Tensor]:
    """The gradients that wait for the optimizer, as far as this rank has them."""
    yield from (_local(parameter.grad) for parameter in module.parameters() if parameter.grad is not None)


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of the buffers that belong to a checkpoint."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield _hf_name(f"{prefix}.{name}".removeprefix(".")), buffer


def own_gradients(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, gradient) of every trained parameter on ONE rank; zeros where the last backward passes left none."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield _hf_name(name), _local(gradient).detach()
