"""An FSDPEngine from the configuration."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.config.engine import EngineChoice
from lockstep.models.compile import compile_layers
from lockstep.models.fast_layers import has_fast_layers, install_fast_layers
from lockstep.models.load import Head, check_packing
from lockstep.models.lora import Lora
from lockstep.models.recompute import apply_recompute
from lockstep.workers.engine.fsdp import sharding
from lockstep.workers.engine.fsdp.engine import FSDPEngine
from lockstep.workers.engine.order import EngineOrder
from lockstep.workers.engine.precision import compute_dtype


def make_fsdp_engine(choice: EngineChoice, order: EngineOrder) -> FSDPEngine:
    """See registry.make_engine."""
    config, model, device = choice.fsdp_config, order.model, order.device
    # A rank that will keep a part of the model never holds the whole of it. One rank keeps what was loaded, without a copy.
    module, source = order.load() if dist.get_world_size() > 1 else (order.load_whole(), None)
    decoder = order.decoder(module)
    if not config.use_torch_compile:
        install_fast_layers(module)
    lora = Lora(module, model, order.head, order.seed) if model.lora_rank and order.optim is not None else None
    dtype = compute_dtype(config.dtype, device)
    half_on_gpu = device.type == "cuda" and dtype != torch.float32
    fast = half_on_gpu and has_fast_layers(module) and not config.use_torch_compile
    apply_recompute(module, order.recompute(module, dtype, fast))
    if config.use_torch_compile:
        compile_layers(module)
    engine = FSDPEngine(
        module,
        order.head,
        version=_version(
            choice.strategy, lora is not None, dtype != torch.float32 and 1 in (dist.get_world_size(), config.fsdp_size)
        ),
        config=config,
        optim=order.optim,
        total_updates=order.total_updates,
        device=device,
        source=source,
        lora=lora,
    )
    # What was loaded whole has been checked, a score head aside, which is packed only where its tokens are divided.
    if engine.score_layer is not None or (source is not None and order.head is not Head.SCORE):
        with engine.on_device():
            check_packing(engine.module, module, str(model.path), device, engine.dtype, engine.score_layer)
            sharding.reshard(engine.module)
    engine.decoder = decoder
    return engine


def _version(strategy: str, adapts: bool, whole_in_half: bool) -> int:
    """1 for strategy fsdp, but where FullyShardedDataParallel fails: with adapters it does not put tied weights back that do not learn, and
    where a rank has the whole model it gives float32 parameters gradients in half precision (tied ones; on a GPU all)."""
    return 1 if strategy == "fsdp" and not adapts and not whole_in_half else 2
