# mypy: implicit-reexport
# ruff: noqa: F401
"""All that is used of megatron-core, in one place, and how to keep from the user what it says about itself."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """For imports and constructors. Inside, megatron-core neither warns nor logs below an error: it speaks of optional packages that are
    not needed (TransformerEngine, Apex), of its own defaults, and of other ways to call it.
    """
    logger = logging.getLogger("megatron")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


with quiet():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import (
        VocabParallelEmbedding,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        model_parallel_cuda_manual_seed,
    )
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

# torch renamed two collectives; megatron-core calls them by their old names.
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", FutureWarning
)
# Its advice to set CUDA_DEVICE_MAX_CONNECTIONS is in docs/backends/megatron.md.
linear_with_grad_accumulation_and_async_allreduce.warned = True
