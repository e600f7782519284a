"""An FSDPEngine from the configuration."""

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lockstep.config.engine import EngineChoice, ModelConfig
from lockstep.errors import ConfigError
from lockstep.models.compile import compile_layers
from lockstep.models.fast_layers import install_fast_layers
from lockstep.models.load import Head, check_packing, model_on_meta
from lockstep.models.lora import Lora
from lockstep.models.recompute import apply_recompute
from lockstep.models.routers import FAMILIES, routers
from lockstep.workers.engine.fsdp import sharded_model
from lockstep.workers.engine.fsdp.engine import FSDPEngine
from lockstep.workers.engine.fsdp.mixture import MixtureEngine
from lockstep.workers.engine.precision import compute_dtype
from lockstep.workers.engine.spec import EngineSpec


def make(choice: EngineChoice, spec: EngineSpec) -> FSDPEngine:
    """See registry.make_engine."""
    config, model, device = choice.fsdp_config, spec.model, spec.device
    adapts = model.adapts and spec.optim is not None
    if adapts and model.lora_adapter_path is not None:
        _check_adapter(spec)
    if model.router_aux_loss_coef:
        engine_class(model, model_on_meta(model, spec.head, spec.pad_token_id), spec.head)
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
    engine = engine_class(model, module, spec.head)(
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
            sharded_model.reshard(engine.module)
    engine.decoder = decoder
    return engine


def engine_class(model: ModelConfig, module: PreTrainedModel, head: Head) -> type[FSDPEngine]:
    """The engine of this model. Raises ConfigError for a load-balance loss in a model without routers."""
    if routers(module) and head is not Head.SCORE:  # scores are not read where responses are predicted
        return MixtureEngine
    if model.router_aux_loss_coef:
        raise ConfigError(
            f"model.router_aux_loss_coef={model.router_aux_loss_coef:g}, but {type(module).__name__} as {head.name.lower()} has no "
            f"router that can be balanced (those of {', '.join(FAMILIES)} can); set it to 0"
        )
    return FSDPEngine


def _check_adapter(spec: EngineSpec) -> None:
    """Raise what Lora raises for an adapter that does not fit the model, before its weights are read."""
    try:
        module = model_on_meta(spec.model, spec.head, spec.pad_token_id)
    except ValueError:
        return  # loading says what is wrong with the model
    Lora(module, spec.model, spec.head, spec.seed)


def _version(choice: EngineChoice, adapts: bool) -> int:
    """The version of FSDP behind a strategy. `fsdp` is FullyShardedDataParallel where ranks share a model, and fsdp2's code elsewhere:
    where a rank has the whole model, FullyShardedDataParallel gives float32 parameters gradients in half precision, and reduces none over
    groups of one rank; with adapters it does not put back tied weights that are frozen."""
    ranks_of_a_copy = 1 if choice.fsdp_config.fsdp_size == 1 else dist.get_world_size()
    return 1 if choice.strategy == "fsdp" and ranks_of_a_copy > 1 and not adapts else 2
