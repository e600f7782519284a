"""How the ranks of this process group divide one model among them. megatron-core keeps this once for the whole process."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from lockstep.backends.megatron.library import model_parallel_cuda_manual_seed, parallel_state
from lockstep.config.engine import MegatronConfig
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class MegatronLayout:
    """The place of this rank, and the ranks that it works with."""

    tensor: dist.ProcessGroup
    """Ranks that share every layer of a stage."""
    pipeline: dist.ProcessGroup
    """Ranks that have a stage each, in order."""
    data: dist.ProcessGroup
    """Ranks that have the same part of the model."""
    model: dist.ProcessGroup
    """Ranks that compute one model together: tensor x pipeline."""

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank() == self.pipeline.size() - 1

    def from_stage(self, tensor: Tensor, stage: int) -> Tensor:
        """The tensor that the ranks of a stage have, on those of all stages; the others give one to fill."""
        if self.pipeline.size() > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, dist.get_global_rank(self.pipeline, stage), group=self.pipeline)
        return tensor


def join_layout(section: MegatronConfig, seed: int) -> MegatronLayout:
    """The layout that the section asks for, made at the first call. Every rank has to call this.

    A second model in the same process takes part in the layout of the first; one that asks for another raises ConfigError.
    """
    if parallel_state.model_parallel_is_initialized() and not _is_alive(parallel_state.get_model_parallel_group()):
        parallel_state.destroy_model_parallel()  # of a run that has ended in this process
    wanted = (section.tensor_model_parallel_size, section.pipeline_model_parallel_size)
    if not parallel_state.model_parallel_is_initialized():
        # Dropout is off and weights are read, so nothing is drawn; but recomputation and sequence parallelism ask for these generators.
        parallel_state.initialize_model_parallel(*wanted, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(seed)
    found = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if found != wanted:
        raise ConfigError(
            f"a model in this process is laid out with tensor_model_parallel_size={found[0]} and pipeline_model_parallel_size={found[1]}; "
            f"another cannot have {wanted[0]} and {wanted[1]}. Give the models that share processes (actor, reference, critic) the same "
            "sizes"
        )
    return MegatronLayout(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        model=parallel_state.get_model_parallel_group(),
    )


def _is_alive(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed still knows the group."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False
