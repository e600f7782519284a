"""A TorchtitanEngine from the configuration. torchtitan is imported here, when it has been chosen."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.config.engine import ModelConfig, OptimConfig, TorchtitanConfig
from lockstep.models.load import Head, load_model, load_on_meta, share_structure
from lockstep.models.recompute import choose_recompute, free_memory
from lockstep.utils.hf_config import read_model_config
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.precision import compute_dtype
from lockstep.workers.engine.torchtitan.check import check
from lockstep.workers.engine.torchtitan.compat import prepare_import
from lockstep.workers.engine.torchtitan.source import LoadedWeights


def make_torchtitan_engine(
    config: TorchtitanConfig,
    *,
    model: ModelConfig,
    head: Head,
    optim: OptimConfig | None,
    total_updates: int,
    device: torch.device,
    seed: int,
    pad_token_id: int | None,
    decoder_attention: str | None,
    max_tokens: int | None,
) -> TrainEngine:
    """See registry.make_engine. Raises ConfigError for a layout or a model that cannot be."""
    hf_config = read_model_config(str(model.path), model.trust_remote_code, **model.override_config)
    check(config, hf_config, dist.get_world_size(), "torchtitan")
    prepare_import(device)
    from lockstep.workers.engine.torchtitan.engine import TorchtitanEngine

    found = load_on_meta(model, head, seed, pad_token_id)
    module = found[0] if found else load_model(model, head, seed, pad_token_id)
    recompute = model.recompute if optim is not None and model.enable_gradient_checkpointing else "none"
    if recompute == "auto":
        element = compute_dtype(config.dtype, device).itemsize
        recompute = choose_recompute(module, max_tokens, free_memory(device), dist.get_world_size(), element)
    engine = TorchtitanEngine(
        module,
        found[1] if found else LoadedWeights(module),
        head,
        config=config,
        recompute=recompute,
        optim=optim,
        total_updates=total_updates,
        device=device,
    )
    engine.decoder = share_structure(module, decoder_attention) if decoder_attention else None
    return engine
