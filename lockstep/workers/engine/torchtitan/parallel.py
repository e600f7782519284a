"""Where the ranks stand (pipeline x data x tensor), and the operations of a model that is divided that way.

Parameters are DTensors: torchtitan divides them over the tensor-parallel ranks and FSDP2 over the data-parallel ones; a pipeline stage
has its own layers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.qwen3.parallelize import parallelize_qwen3

from lockstep.workers.engine.torchtitan.model import PackedDecoder

_BACKEND = "partial_dtensor"
"""DTensors over the tensor-parallel ranks only. torchtitan's other two ways need a newer FSDP, or DTensors from the data on."""
_RECOMPUTE = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config(preserve_rng_state=False)}


@dataclass(frozen=True)
class Layout:
    """This rank's place, and the groups it is in."""

    dims: ParallelDims
    stage: int
    """Which part of the layers it has, of `dims.pp`."""
    model_group: dist.ProcessGroup | None
    """The ranks of one copy of the model; None where each has one."""
    stages: dist.ProcessGroup | None
    """The ranks that have the other stages of what this rank has; None without a pipeline."""
    ends: dist.ProcessGroup | None
    """The first and the last of `stages`, on these two."""
    tensor_mesh: DeviceMesh | None
    """The ranks that share this rank's layers; None without tensor parallelism."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.dims.pp - 1

    @property
    def reports(self) -> bool:
        """One rank of each copy: it has the loss, and no other rank of its copy does."""
        return self.is_last and (self.tensor_mesh is None or self.tensor_mesh.get_local_rank() == 0)


def make_layout(tensor: int, pipeline: int) -> Layout:
    """Put the ranks on a grid [pipeline, data, tensor]. Every rank has to call it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    data = world // (tensor * pipeline)
    set_spmd_backend(_BACKEND)
    dims = ParallelDims(dp_replicate=1, dp_shard=data, cp=1, tp=tensor, pp=pipeline, ep=1, world_size=world, spmd_backend=_BACKEND)
    dims.build_mesh()
    grid = torch.arange(world).view(pipeline, data, tensor)
    copies = [grid[:, d].flatten().tolist() for d in range(data)]
    ends = [grid[[0, -1], d, t].tolist() for d in range(data) for t in range(tensor)]
    return Layout(
        dims=dims,
        stage=rank // (data * tensor),
        model_group=_own_group(copies) if tensor * pipeline > 1 else None,
        stages=dims.get_mesh("pp").get_group() if pipeline > 1 else None,
        ends=_own_group(ends) if pipeline > 1 else None,
        tensor_mesh=dims.get_mesh("tp") if tensor > 1 else None,
    )


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """Make all these groups, and return the one that this rank is in."""
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next((group for ranks, group in made if dist.get_rank() in ranks), None)


def build(
    config: PackedDecoder.Config, layout: Layout, dtype: torch.dtype, recompute: str, trained: bool, device: torch.device
) -> PackedDecoder:
    """This rank's part of the model on `device`, divided and without values. Weights are float32; computation runs in `dtype`."""
    with torch.device("meta"):
        model = config.build()
    _keep_stage(model, layout)
    model.requires_grad_(trained)
    parallelize_qwen3(
        model,
        parallel_dims=layout.dims,
        training=TrainingConfig(mixed_precision_param="float32" if dtype == torch.float32 else "bfloat16"),
        # A rank never keeps gathered weights after a pass: they would be old after the next update.
        parallelism=ParallelismConfig(spmd_backend=_BACKEND, fsdp_reshard_after_forward="always"),
        compile_config=CompileConfig(),
        ac_config=_RECOMPUTE[recompute],
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # torchtitan sums gradients (it divides by 1); gloo can do that only as a plain sum.
            module.set_force_sum_reduction_for_comms(True)
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    return model


def compile_layers(model: PackedDecoder, backend: str = "inductor") -> None:
    """Compile the forward pass of each layer in place.

    torchtitan's own switch wants a layer to be one graph, and attention over packs is not traced: layouts differ from one to the next.
    """
    for layer in model.layers.values():
        block = getattr(layer, "_checkpoint_wrapped_module", layer)
        block.forward = torch.compile(block.forward, dynamic=True, backend=backend)


def _keep_stage(model: PackedDecoder, layout: Layout) -> None:
    """Leave the layers of this rank's stage; the embedding is in the first, norm and output layer are in the last."""
    layers, stages = len(model.layers), layout.dims.pp
    own = range(layers * layout.stage // stages, layers * (layout.stage + 1) // stages)
    for name in list(model.layers):
        if int(name) not in own:
            del model.layers[name]
    if not layout.is_first:
        model.tok_embeddings = None
    if not layout.is_last:
        model.norm = model.lm_head = None


@torch.no_grad()
def read_shards(parameters: dict[str, nn.Parameter], read: Callable[[str, int, int], Tensor]) -> None:
    """Fill parameters by name: each rank asks `read(name, start, stop)` for the rows of its shards, and keeps its columns of them."""
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        if local.numel():
            _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
            rows = read(name, offset[0], offset[0] + len(local))
            local.copy_(rows if rows.dim() == 1 else rows[:, offset[1] : offset[1] + local.shape[1]])


def whole_tensors(
    parameters: dict[str, nn.Parameter], shapes: dict[str, tuple[int, ...]], owners: dict[str, int], layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every name in `shapes`, on every rank, one at a time; `owners` are the stages that have them."""
    for name, shape in shapes.items():
        mine = owners[name] == layout.stage
        if mine:
            tensor = _whole(parameters[name])
        else:
            tensor = torch.empty(shape, device=next(iter(parameters.values())).device)
        if layout.stages is not None:
            dist.broadcast(tensor, group=layout.stages, group_src=owners[name])
        yield name, tensor


def _whole(parameter: nn.Parameter) -> Tensor:
    """The parameter gathered over its mesh, one dimension after the other: asked for both at once, torch does the same and warns."""
    tensor = parameter.detach()
    assert isinstance(tensor, DTensor)
    for dim in range(tensor.device_mesh.ndim):
        tensor = tensor.redistribute(placements=[Replicate() if d <= dim else p for d, p in enumerate(tensor.placements)])
    return tensor.to_local()


def clip_grad_norm(
    gradients: Iterable[Tensor], counted: Iterable[Tensor], max_norm: float, group: dist.ProcessGroup | None
) -> float:
    """Scale `gradients` down to `max_norm`; returns their norm before, which is that of `counted` on all ranks of `group` together.

    torch's own function cannot take gradients that lie on several meshes, and stops half-way, with some of them scaled.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for gradient in counted:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    squares = torch.stack([_squares(part, mesh) for mesh, part in by_mesh.items()]).sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        _local(gradient).mul_(scale)
    return float(norm)


def _squares(gradients: list[Tensor], mesh: DeviceMesh | None) -> Tensor:
    """The sum of squares of all entries; entries that several ranks of the mesh have count once."""
    copies = [_copies(gradient) for gradient in gradients]
    norms = torch.stack(torch._foreach_norm([_local(gradient) for gradient in gradients]))
    squares = (norms.square() / torch.tensor(copies, device=norms.device)).sum()
    if mesh is not None:
        for dim in range(mesh.ndim):
            dist.all_reduce(squares, group=mesh.get_group(dim))
    return squares


def _copies(gradient: Tensor) -> int:
    """How many ranks have each entry."""
    if not isinstance(gradient, DTensor):
        return 1
    return math.prod(gradient.device_mesh.size(dim) for dim, p in enumerate(gradient.placements) if p.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
