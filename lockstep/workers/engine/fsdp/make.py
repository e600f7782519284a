"""An FSDPEngine from the configuration."""

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lockstep.config.engine import EngineChoice
from lockstep.models.fast_layers import compile_layers, install_fast_layers
from lockstep.models.fit import check_fit
from lockstep.models.load import Head, check_packing
from lockstep.models.lora import Lora
from lockstep.models.recompute import apply_recompute
from lockstep.models.routers import routers
from lockstep.workers.engine.fsdp import sharding
from lockstep.workers.engine.fsdp.engine import FSDPEngine
from lockstep.workers.engine.spec import EngineSpec, compute_dtype


def make(choice: EngineChoice, spec: EngineSpec) -> FSDPEngine:
    """Return the engine; see registry.make_engine."""
    config = choice.fsdp_config
    model = spec.model
    device = spec.device
    adapts = model.adapts and spec.optim is not None
    check_fit(model, spec.head, "model", learns=spec.optim is not None)
    # A rank that will keep a part of the model never holds the whole of it. One rank keeps what was loaded, without a copy.
    module, source = spec.load() if dist.get_world_size() > 1 else (spec.load_whole(), None)
    decoder = spec.decoder(module)
    dtype = compute_dtype(config.dtype, device)
    fast = device.type == "cuda" and dtype != torch.float32 and not config.use_torch_compile and install_fast_layers(module)
    lora = Lora(module, model, spec.head, spec.seed) if adapts else None
    if lora is not None and decoder is not None:
        lora.adapt(decoder)
    apply_recompute(module, spec.recompute(module, dtype, fast))
    if config.use_torch_compile:
        compile_layers(module)
    engine = engine_class(module, spec.head)(
        module,
        spec,
        version=_version(choice, adapts),
        config=config,
        source=source,
        lora=lora,
    )
    if source is not None:  # what was loaded whole has been checked
        with engine.on_device():
            check_packing(engine.module, module, str(model.path), device, engine.dtype)
            sharding.reshard(engine.module)
    engine.decoder = decoder
    return engine


def engine_class(module: PreTrainedModel, head: Head) -> type[FSDPEngine]:
    """Return the engine class of this model. A score model's routers are not watched: scores are not read where responses are predicted."""
    if head is Head.SCORE or not routers(module):
        return FSDPEngine
    from lockstep.workers.engine.fsdp.mixture import MixtureEngine

    return MixtureEngine


def _version(choice: EngineChoice, adapts: bool) -> int:
    """Return the version of FSDP behind a strategy.

    `fsdp` is FullyShardedDataParallel if ranks share a model, and fsdp2's code otherwise: on a rank with the whole model,
    FullyShardedDataParallel gives float32 parameters gradients in half precision and reduces none over groups of one rank; with adapters it
    does not put back tied weights that are frozen.
    """
    ranks_of_a_copy = 1 if choice.fsdp_config.fsdp_size == 1 else dist.get_world_size()
    return 1 if choice.strategy == "fsdp" and ranks_of_a_copy > 1 and not adapts else 2
