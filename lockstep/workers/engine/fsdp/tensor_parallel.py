"""Tensor parallelism: the ranks of a group share every layer and compute the same rows together.

The layers are split as transformers' plan for the family says: projections into heads and MLP columns by rows of their weight (colwise),
those back to the hidden size by columns (rowwise). Norms, value and score heads are whole on every rank. The vocabulary is split, in
the embedding and in the output layer; log-probs are computed from its parts without gathering logits (models/chunked_head.py).

The experts of a mixture are divided: a rank has some of them whole, computes what all tokens want of these, and the results are added up
(expert parallelism). Routers and shared experts are whole on every rank.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call
from transformers import PreTrainedModel

from lockstep.models.mixin import replace_class
from lockstep.workers.engine.fsdp.check import is_of_experts

_HEADS_DIM = 2
"""Of [batch, tokens, heads, head size], what norms of single heads see."""
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True),
    # Where what follows sees all columns, as OLMoE's norms of queries and keys and what cuts a fused projection: every rank has all.
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}


class _SplitLinear(nn.Linear):
    """A linear layer split by rows that gives whole outputs: for those who want logits."""

    def forward(self, input: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        whole = DTensor.from_local(input, self.weight.device_mesh, [Replicate()], run_check=False)
        return super().forward(whole).full_tensor()  # type: ignore[attr-defined]


class _SplitRows(ParallelStyle):
    """Split the parameters of a linear layer by rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replace_class(module, _SplitLinear)
        _split_parameters(module, device_mesh)
        return module


class _DivideExperts(ParallelStyle):
    """Give each rank as many experts as any other."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _split_parameters(module, device_mesh)
        experts: Any = module
        experts.num_experts //= device_mesh.size()
        experts._is_expert_parallel = True  # transformers then skips what is not of its experts
        experts.forward = functools.partial(_own_experts, experts, experts.forward, device_mesh)
        return module


def _split_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)))


def _own_experts(
    module: Any, forward: Callable[..., Tensor], mesh: DeviceMesh, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """What the experts of all ranks give: this rank's own, and those of the others added to them. `hidden` [N, size], `chosen` [N, k] and
    `weights` [N, k] are the same on every rank."""
    parameters = dict(module.named_parameters(recurse=False))
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return forward(hidden, chosen, weights)  # called from below, with this rank's parameters
    own = chosen - mesh.get_local_rank() * module.num_experts
    is_foreign = (own < 0) | (own >= module.num_experts)
    # What a rank finds for tokens and weights is a part of their gradient.
    hidden, weights = (
        DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()]) for x in (hidden, weights)
    )
    part = functional_call(
        module,
        {name: parameter.to_local() for name, parameter in parameters.items()},
        (hidden, own.masked_fill(is_foreign, module.num_experts), weights.masked_fill(is_foreign, 0.0)),
    )
    return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the model in place over the ranks of `mesh`. Every rank has the same weights, or none yet (meta)."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = {module: name for name, module in model.named_modules()}
    plan: dict[str, ParallelStyle] = {}
    for pattern, kind in (model.config.base_model_tp_plan or {}).items():
        if kind in _STYLES and not is_of_experts(pattern):
            # Only layers that are there: in a mixture some have experts, and others an MLP.
            found = re.compile(rf"{model.base_model_prefix}\.{pattern}".replace(".*.", r"\.\d+\."))
            plan |= {name: _STYLES[kind]() for name in names.values() if found.fullmatch(name)}
    plan |= {
        name: _DivideExperts() for name in names.values() if name.endswith(".mlp.experts")
    }  # not every version's plan has them
    embedding = model.get_input_embeddings()
    output = model.get_output_embeddings()
    plan[names[embedding]] = _STYLES["embedding_rowwise"]()
    if type(output) is nn.Linear:
        plan[names[output]] = _SplitRows()
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for tied, source in (model.all_tied_weights_keys or {}).items():
        owner, _, attribute = tied.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(source))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
