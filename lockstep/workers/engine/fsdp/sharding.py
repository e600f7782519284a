"""A model that FSDP or FSDP2 shards: sharding it, filling it, gathering it, and the operations of a step that differ.

FSDP1 is FullyShardedDataParallel, FSDP2 is fully_shard, both for several ranks; one rank keeps the model whole (whole_model.py).

Pitfalls, all seen on a CPU with torch 2.13. FSDP1: a full state dict with CPU offload of a CPU model is a segmentation fault (weights are
gathered one unit at a time instead), and `sync_module_states` raises (every rank reads the same weights instead). FSDP2 hangs its
pre-backward hook on the model's outputs and warns about an output that is a view, which a head with a bias returns (`own_logits` makes it
a separate tensor).
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
from torch.distributed.fsdp.wrap import CustomPolicy
from transformers import PreTrainedModel

from lockstep.config.engine import FSDPConfig
from lockstep.models.fast_layers import takes_float_residual
from lockstep.models.scores import ScoreLayer
from lockstep.models.weight_files import WeightSource
from lockstep.workers.engine import dtensor
from lockstep.workers.engine.dtensor import ReadRows, local_part, read_shards, whole_tensor
from lockstep.workers.engine.fsdp.tensor_parallel import split_layers
from lockstep.workers.engine.fsdp.whole_model import WholeModel, keep_whole

_STRATEGIES = {
    (1, True): ShardingStrategy.FULL_SHARD,
    (1, False): ShardingStrategy.SHARD_GRAD_OP,
    (2, True): ShardingStrategy.HYBRID_SHARD,
    (2, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
}
"""FSDP1's name for (dimensions of the mesh: all ranks in a row, or copies x ranks of one copy; whether layers are freed after use)."""


def all_names(name: str) -> bool:
    """Choose every name."""
    return True


@dataclass(frozen=True)
class Meshes:
    """How the ranks are laid out: those that share layers next to each other."""

    data: DeviceMesh
    """What shards are spread over: all data ranks in a row, or copies x ranks of one copy."""
    tensor: DeviceMesh | None
    """The ranks that share every layer with this one."""


def make_meshes(config: FSDPConfig, device: torch.device) -> Meshes:
    """The layout of all ranks. That it is possible is for `check` to say."""
    tensor = config.tensor_parallel_size
    world = dist.get_world_size()
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


def own_logits(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that makes the model's logits a tensor of their own where they are a view."""
    logits = getattr(output, "logits", None)  # none where hidden states were handed out
    if logits is not None and logits.requires_grad and logits._is_view():
        output.logits = logits.clone()


def reshard(module: nn.Module) -> None:
    """Free what forward passes without a backward pass have gathered: it would not follow the next update."""
    for part in module.modules():
        if isinstance(part, FSDPModule | WholeModel):
            part.reshard()


@contextmanager
def gradient_sync(module: nn.Module, enabled: bool, keep_gathered: bool) -> Iterator[None]:
    """Reduce gradients over the ranks in backward passes inside, or only add them up locally.

    With `keep_gathered` whole parameters stay until the pass that reduces (FSDP2): the passes before it gather nothing again.
    """
    if isinstance(module, FullyShardedDataParallel) and not enabled:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(enabled)
        module.set_reshard_after_backward(enabled or not keep_gathered)
    yield
    if isinstance(module, WholeModel) and enabled:
        module.reshard()


def clip_grad_norm(module: nn.Module, max_norm: float) -> float:
    """Scale the whole gradient down to `max_norm`; returns its norm before."""
    if isinstance(module, FullyShardedDataParallel):
        return float(module.clip_grad_norm_(max_norm))
    return dtensor.clip_grad_norm((p.grad for p in module.parameters() if p.grad is not None), max_norm)


def whole_tensors(module: nn.Module, chosen: Callable[[str], bool] = all_names) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of the `chosen` parameters and saved buffers. A collective: every rank takes all of them.

    What is sharded is gathered one parameter (FSDP2) or one layer (FSDP1) at a time. A parameter that this rank has whole is given as
    it is, not as a copy.
    """
    if isinstance(module, FullyShardedDataParallel):
        for name, parameter in whole_units(module, writeback=False):
            if chosen(name):
                yield name, parameter.detach().clone()
    else:
        reshard(module)
        yield from ((name, whole_tensor(p)) for name, p in module.named_parameters() if chosen(name))
    yield from ((name, buffer) for name, buffer in saved_buffers(module) if chosen(name))


def whole_units(module: FullyShardedDataParallel, writeback: bool) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, whole parameter) of what FSDP1 gathers at once, one unit after the other, the root first; a tied one comes
    once. With `writeback` what is written to it is kept."""
    for prefix, unit in module.named_modules():
        if isinstance(unit, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=writeback):
                inner = [m for m in unit.modules() if m is not unit and isinstance(m, FullyShardedDataParallel)]
                inside = {id(parameter) for m in inner for parameter in m.parameters()}
                for name, parameter in unit.named_parameters(prefix=prefix):
                    if id(parameter) not in inside:
                        yield hf_name(name), parameter


def hf_name(name: str) -> str:
    """The name of a parameter without what FSDP1 puts into it."""
    return name.replace("_fsdp_wrapped_module.", "")


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of the buffers that belong to a checkpoint."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield hf_name(f"{prefix}.{name}".removeprefix(".")), buffer
