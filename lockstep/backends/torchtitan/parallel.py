"""Where the ranks stand (pipeline x data x tensor), and the operations of a model that is divided that way.

Parameters are DTensors: torchtitan divides them over the tensor-parallel ranks and FSDP2 over the data-parallel ones; a pipeline stage
has its own layers only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.qwen3.parallelize import parallelize_qwen3

from lockstep.backends.torchtitan.model import PackedDecoder
from lockstep.workers.engine.dtensor import whole_tensor

_BACKEND = "partial_dtensor"
"""DTensors over the tensor-parallel ranks only. torchtitan's other two ways need a newer FSDP, or DTensors from the data on."""
_RECOMPUTE = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config(preserve_rng_state=False)}


@dataclass(frozen=True)
class TitanLayout:
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


def make_layout(tensor: int, pipeline: int) -> TitanLayout:
    """Put the ranks on a grid [pipeline, data, tensor]. Every rank has to call it."""
    world = dist.get_world_size()
    rank = dist.get_rank()
    data = world // (tensor * pipeline)
    set_spmd_backend(_BACKEND)
    dims = ParallelDims(dp_replicate=1, dp_shard=data, cp=1, tp=tensor, pp=pipeline, ep=1, world_size=world, spmd_backend=_BACKEND)
    dims.build_mesh()
    grid = torch.arange(world).view(pipeline, data, tensor)
    copies = [grid[:, d].flatten().tolist() for d in range(data)]
    ends = [grid[[0, -1], d, t].tolist() for d in range(data) for t in range(tensor)]
    return TitanLayout(
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
    config: PackedDecoder.Config, layout: TitanLayout, dtype: torch.dtype, recompute: str, trained: bool, device: torch.device
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


def _keep_stage(model: PackedDecoder, layout: TitanLayout) -> None:
    """Leave the layers of this rank's stage; the embedding is in the first, norm and output layer are in the last."""
    layers = len(model.layers)
    stages = layout.dims.pp
    own = range(layers * layout.stage // stages, layers * (layout.stage + 1) // stages)
    for name in list(model.layers):
        if int(name) not in own:
            del model.layers[name]
    if not layout.is_first:
        model.tok_embeddings = None
    if not layout.is_last:
        model.norm = model.lm_head = None


def whole_tensors(
    parameters: Mapping[str, Tensor], shapes: dict[str, tuple[int, ...]], owners: dict[str, int], layout: TitanLayout
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every name in `shapes`, on every rank, one at a time; `owners` are the stages that have them."""
    for name, shape in shapes.items():
        mine = owners[name] == layout.stage
        if mine:
            tensor = whole_tensor(parameters[name])
        else:
            tensor = torch.empty(shape, device=next(iter(parameters.values())).device)
        if layout.stages is not None:
            dist.broadcast(tensor, group=layout.stages, group_src=owners[name])
        yield name, tensor
