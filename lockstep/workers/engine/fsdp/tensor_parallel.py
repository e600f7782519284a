"""Tensor parallelism: the ranks of a group share every layer and compute the same rows together.

The layers are split as transformers' plan for the family says: projections into heads and MLP columns by rows of their weight (colwise),
those back to the hidden size by columns (rowwise). Norms, value and score heads are whole on every rank. The vocabulary is split, in
the embedding and in the output layer; log-probs are computed from its parts without gathering logits (models/chunked_head.py).
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

_HEADS_DIM = 2
"""Of [batch, tokens, heads, head size], what norms of single heads see."""
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True),
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
        module.__class__ = _SplitLinear
        for name, parameter in list(module.named_parameters(recurse=False)):
            split = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(split))
        return module


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the model in place over the ranks of `mesh`. Every rank has the same weights, or none yet (meta)."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    prefix = model.base_model_prefix
    plan = {f"{prefix}.{pattern}": _STYLES[kind]() for pattern, kind in (model.config.base_model_tp_plan or {}).items()}
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    plan[names[embedding]] = _STYLES["embedding_rowwise"]()
    if type(output) is nn.Linear:
        plan[names[output]] = _SplitRows()
    parallelize_module(model, mesh, plan, src_data_rank=None)
    for tied, source in (model.all_tied_weights_keys or {}).items():
        owner, _, attribute = tied.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(source))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
