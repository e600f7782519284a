"""A VeOmniEngine from the configuration."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lockstep.config.engine import ModelConfig, OptimConfig, VeOmniConfig
from lockstep.models.load import Head, check_packing, load_model, load_on_meta, share_structure
from lockstep.models.meta import WeightSource
from lockstep.models.recompute import choose_recompute, free_memory
from lockstep.utils.hf_config import read_model_config
from lockstep.workers.engine.fsdp import sharding
from lockstep.workers.engine.precision import compute_dtype
from lockstep.workers.engine.veomni.check import check
from lockstep.workers.engine.veomni.engine import VeOmniEngine


def make_veomni_engine(
    config: VeOmniConfig,
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
) -> VeOmniEngine:
    """See registry.make_engine. Raises ConfigError, before any model is loaded, for a layout or a model that cannot be."""
    hf_config = read_model_config(str(model.path), model.trust_remote_code, **model.override_config)
    check(config, hf_config, dist.get_world_size(), "veomni")
    plain, source = load_on_meta(model, head, seed, pad_token_id) or _loaded(load_model(model, head, seed, pad_token_id))
    recompute = model.recompute if optim is not None and model.enable_gradient_checkpointing else "none"
    if recompute == "auto":
        element = compute_dtype(config.dtype, device).itemsize
        recompute = choose_recompute(plain, max_tokens, free_memory(device), dist.get_world_size(), element)
    engine = VeOmniEngine(
        plain,
        head,
        config=config,
        recompute=recompute,
        optim=optim,
        total_updates=total_updates,
        device=device,
        source=source,
    )
    assert isinstance(engine.module, PreTrainedModel)
    check_packing(engine.module, engine.module, str(model.path), device, engine.dtype, engine.score_layer)
    sharding.reshard(engine.module)
    engine.decoder = share_structure(plain, decoder_attention) if decoder_attention else None
    return engine


def _loaded(module: PreTrainedModel) -> tuple[PreTrainedModel, WeightSource]:
    """A model that was loaded whole, and its weights as what fills another one."""
    return module, WeightSource(None, {name: parameter.detach() for name, parameter in module.named_parameters()})
