"""Which class stands behind actor.strategy, critic.strategy and reward_model.strategy. Backends are imported when they are chosen."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lockstep.config.engine import STRATEGIES, EngineChoice, ModelConfig, OptimConfig
from lockstep.errors import ConfigError
from lockstep.models.compile import compile_layers
from lockstep.models.load import Head, check_packing, load_model, load_on_meta, share_structure
from lockstep.models.meta import WeightSource
from lockstep.models.recompute import apply_recompute, choose_recompute, free_memory
from lockstep.utils.hf_config import read_model_config
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.precision import compute_dtype


def make_engine(
    choice: EngineChoice,
    *,
    model: ModelConfig,
    head: Head,
    optim: OptimConfig | None,
    total_updates: int,
    device: torch.device,
    seed: int,
    pad_token_id: int | None = None,
    decoder_attention: str | None = None,
    max_tokens: int | None = None,
) -> TrainEngine:
    """An engine with its model loaded. `optim` None makes a frozen one, which cannot learn.

    `decoder_attention` also makes `engine.decoder`, a module for generation with that attention function. `max_tokens`, the tokens of
    the largest micro-batch where that is known, decides how much model.recompute=auto recomputes.
    """
    if choice.strategy in ("fsdp", "fsdp2"):
        fsdp = choice.fsdp_config
        from lockstep.workers.engine.fsdp.check import check as check_fsdp
        from lockstep.workers.engine.fsdp.engine import FSDPEngine

        if fsdp.ulysses_sequence_parallel_size > 1:
            check_fsdp(fsdp, _hf_config(model), dist.get_world_size(), "fsdp_config")
        # A rank that will keep a part of the model never holds the whole of it.
        found = load_on_meta(model, head, seed, pad_token_id) if dist.get_world_size() > 1 else None
        module, source = found or (load_model(model, head, seed, pad_token_id), None)
        decoder = share_structure(module, decoder_attention) if decoder_attention else None
        if optim is not None and model.enable_gradient_checkpointing:
            apply_recompute(module, _recompute(model, module, fsdp.dtype, max_tokens, device))
        if fsdp.use_torch_compile:
            compile_layers(module)
        engine = FSDPEngine(
            module,
            head,
            version=1 if choice.strategy == "fsdp" else 2,
            config=fsdp,
            optim=optim,
            total_updates=total_updates,
            device=device,
            source=source,
        )
        # load_model has checked what it loaded, a score head aside, which is packed only where its tokens are divided.
        if engine.score_layer is not None or (source is not None and head is not Head.SCORE):
            check_packing(engine.module, module, str(model.path), device, engine.dtype, engine.score_layer)
        engine.decoder = decoder
        return engine
    if choice.strategy == "veomni":
        from lockstep.workers.engine.veomni.check import check as check_veomni

        check_veomni(choice.veomni, _hf_config(model), dist.get_world_size(), "veomni")
        from lockstep.workers.engine.veomni.engine import VeOmniEngine

        module, source = load_on_meta(model, head, seed, pad_token_id) or _loaded(load_model(model, head, seed, pad_token_id))
        recomputes = optim is not None and model.enable_gradient_checkpointing
        engine = VeOmniEngine(
            module,
            head,
            config=choice.veomni,
            recompute=_recompute(model, module, choice.veomni.dtype, max_tokens, device) if recomputes else "none",
            optim=optim,
            total_updates=total_updates,
            device=device,
            source=source,
        )
        assert isinstance(engine.module, PreTrainedModel)
        check_packing(engine.module, engine.module, str(model.path), device, engine.dtype, engine.score_layer)
        engine.decoder = share_structure(module, decoder_attention) if decoder_attention else None
        return engine
    raise ConfigError(f"strategy={choice.strategy} is not known; choose one of: {', '.join(STRATEGIES)}")


def _hf_config(model: ModelConfig) -> Any:
    assert model.path is not None, "the composition root fills in a path"
    return read_model_config(model.path, model.trust_remote_code, **model.override_config)


def _loaded(module: PreTrainedModel) -> tuple[PreTrainedModel, WeightSource]:
    """A model with its weights as what fills another one."""
    return module, WeightSource(None, {name: parameter.detach() for name, parameter in module.named_parameters()})


def _recompute(model: ModelConfig, module: PreTrainedModel, dtype: str, max_tokens: int | None, device: torch.device) -> str:
    if model.recompute != "auto":
        return model.recompute
    element = compute_dtype(dtype, device).itemsize
    return choose_recompute(module, max_tokens, free_memory(device), dist.get_world_size(), element)
