"""How far a sampler on a GPU is from the trainer whose weights it has, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from helpers.rollouts import PAD, sampling
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import EngineChoice, ModelConfig, OptimConfig
from lockstep.models.attention import CACHED
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.registry import make_engine
from lockstep.workers.engine.spec import EngineSpec
from lockstep.workers.rollout.registry import make_rollout
from lockstep.workers.rollout.request import Request
from lockstep.workers.weight_sync.source import SharedWeights


def gap(path: str, model: dict[str, Any], save: Path | None = None) -> float:
    """Mean difference of sampler and trainer in bfloat16, with adapters that do something; saves the model that they make."""
    spec = EngineSpec(
        model=ModelConfig(path=path, **model), head=Head.LANGUAGE_MODEL, optim=OptimConfig(), total_updates=1,
        device=torch.device("cuda", 0), seed=7, decoder_attention=CACHED,
    )  # fmt: skip
    choice = EngineChoice("fsdp2")
    choice.fsdp_config.dtype = "bfloat16"
    engine = make_engine(choice, spec)
    torch.manual_seed(3)
    for name, tensor in engine.decoder_weights():
        if name.endswith(".lora_B"):
            tensor.detach().copy_(0.01 * torch.randn(tensor.shape, device="cuda"))
    if save is not None:
        engine.save(save)
    shared = SharedWeights(engine, torch.bfloat16)
    prompts = [torch.arange(2 + i % 9, 9 + i % 9) for i in range(96)]
    with shared.borrowed():
        rollout = make_rollout(shared.decoder, RolloutConfig(max_num_seqs=64), PAD)
        rollout.own_weights = shared.keeps_copy
        done = rollout.generate([Request(p, (0, i, 0)) for i, p in enumerate(prompts)], sampling(max_tokens=40, stop_token_ids=()))
    if model:
        with shared.borrowed() as copied:
            assert copied == sum(2 * tensor.numel() for name, tensor in engine.decoder_weights() if ".lora_" in name)
    rows = {"prompts": Ragged.from_rows(prompts), "responses": Ragged.from_rows([c.ids for c in done])}
    trained = engine.forward(DataProto.from_dict(rows), Budget(8192)).ragged("log_probs").values.cpu()
    return float((trained - torch.cat([c.log_probs for c in done])).abs().mean())
