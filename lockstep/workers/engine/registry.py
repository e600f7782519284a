"""Which class stands behind actor.strategy, critic.strategy and reward_model.strategy. Backends are imported when they are chosen."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lockstep.config.engine import STRATEGIES, EngineChoice, EngineConfig, FSDPConfig, ModelConfig, OptimConfig, check_lora
from lockstep.errors import ConfigError
from lockstep.models.compile import compile_layers
from lockstep.models.fast_layers import has_fast_layers, install_fast_layers
from lockstep.models.load import Head, check_packing, load_model, load_on_meta, share_structure
from lockstep.models.lora import Lora
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
        from lockstep.workers.engine.fsdp import sharding
        from lockstep.workers.engine.fsdp.check import check
        from lockstep.workers.engine.fsdp.engine import FSDPEngine

        hf_config = read_model_config(str(model.path), model.trust_remote_code, **model.override_config)
        check(fsdp, hf_config, dist.get_world_size(), "fsdp_config", choice.strategy)
        check_lora(model, choice, "actor", "model")
        # A rank that will keep a part of the model never holds the whole of it.
        found = load_on_meta(model, head, seed, pad_token_id) if dist.get_world_size() > 1 else None
        module, source = found or (load_model(model, head, seed, pad_token_id), None)
        decoder = share_structure(module, decoder_attention) if decoder_attention else None
        if not fsdp.use_torch_compile:
            install_fast_layers(module)
        lora = Lora(module, model, head, seed) if model.lora_rank and optim is not None else None
        if optim is not None and model.enable_gradient_checkpointing:
            apply_recompute(module, _recompute(model, module, fsdp, max_tokens, device))
        if fsdp.use_torch_compile:
            compile_layers(module)
        engine = FSDPEngine(
            module,
            head,
            version=_fsdp_version(choice, lora is not None, device),
            config=fsdp,
            optim=optim,
            total_updates=total_updates,
            device=device,
            source=source,
            lora=lora,
        )
        # load_model has checked what it loaded, a score head aside, which is packed only where its tokens are divided.
        if engine.score_layer is not None or (source is not None and head is not Head.SCORE):
            with engine.on_device():
                check_packing(engine.module, module, str(model.path), device, engine.dtype, engine.score_layer)
                sharding.reshard(engine.module)
        engine.decoder = decoder
        return engine
    if choice.strategy == "megatron":
        from lockstep.workers.engine.megatron.check import check_device
        from lockstep.workers.engine.megatron.engine import MegatronEngine

        check_device(device.type, "megatron")
        found = load_on_meta(model, head, seed, pad_token_id)
        module, source = found or (load_model(model, head, seed, pad_token_id), None)
        recomputes = optim is not None and model.enable_gradient_checkpointing
        megatron_engine = MegatronEngine(
            module,
            head,
            config=choice.megatron,
            optim=optim,
            total_updates=total_updates,
            device=device,
            seed=seed,
            recompute=_recompute(model, module, choice.megatron, max_tokens, device) if recomputes else "none",
            source=source,
        )
        megatron_engine.decoder = share_structure(module, decoder_attention) if decoder_attention else None
        return megatron_engine
    options: dict[str, Any] = {
        "model": model, "head": head, "optim": optim, "total_updates": total_updates, "device": device, "seed": seed,
        "pad_token_id": pad_token_id, "decoder_attention": decoder_attention, "max_tokens": max_tokens,
    }  # fmt: skip
    if choice.strategy == "torchtitan":
        from lockstep.workers.engine.torchtitan.make import make_torchtitan_engine

        return make_torchtitan_engine(choice.torchtitan, **options)
    if choice.strategy == "veomni":
        from lockstep.workers.engine.veomni.make import make_veomni_engine

        return make_veomni_engine(choice.veomni, **options)
    raise ConfigError(f"strategy={choice.strategy} is not known; choose one of: {', '.join(STRATEGIES)}")


def _fsdp_version(choice: EngineChoice, adapts: bool, device: torch.device) -> int:
    """1 for strategy fsdp, but where FullyShardedDataParallel fails: with adapters it does not put tied weights back that do not learn, and
    on one GPU in half precision it gives float32 parameters gradients of the other type (torch 2.11)."""
    alone = dist.get_world_size() == 1 and device.type == "cuda" and compute_dtype(choice.engine.dtype, device) != torch.float32
    return 1 if choice.strategy == "fsdp" and not adapts and not alone else 2


def check_engine(choice: EngineChoice, hf_config: Any, world_size: int, device_type: str, key: str) -> None:
    """Raise ConfigError unless `world_size` ranks can hold a model of `hf_config` in the chosen engine; loads nothing.

    `device_type` is cpu or cuda, and `key` is where the choice stands in the configuration, such as actor_rollout_ref.actor.
    """
    if choice.strategy in ("fsdp", "fsdp2"):
        from lockstep.workers.engine.fsdp.check import check

        check(choice.fsdp_config, hf_config, world_size, f"{key}.fsdp_config", choice.strategy)
    elif choice.strategy == "megatron":
        from lockstep.workers.engine.megatron.check import check as check_megatron
        from lockstep.workers.engine.megatron.check import check_device

        check_megatron(choice.megatron, hf_config, world_size, f"{key}.megatron")
        if device_type == "cpu":
            check_device(device_type, f"{key}.megatron")
    elif choice.strategy == "torchtitan":
        from lockstep.workers.engine.torchtitan.check import check as check_torchtitan

        check_torchtitan(choice.torchtitan, hf_config, world_size, f"{key}.torchtitan")
    elif choice.strategy == "veomni":
        from lockstep.workers.engine.veomni.check import check as check_veomni

        check_veomni(choice.veomni, hf_config, world_size, f"{key}.veomni")


def _recompute(
    model: ModelConfig, module: PreTrainedModel, section: EngineConfig, max_tokens: int | None, device: torch.device
) -> str:
    if model.recompute != "auto":
        return model.recompute
    dtype = compute_dtype(section.dtype, device)
    fast = isinstance(section, FSDPConfig) and device.type == "cuda" and dtype != torch.float32 and has_fast_layers(module)
    fast = fast and not (isinstance(section, FSDPConfig) and section.use_torch_compile)
    return choose_recompute(module, max_tokens, free_memory(device), dist.get_world_size(), dtype.itemsize, fast)
