"""What a rollout over an actor's weights is when it is checked: the decoder, with its weights, where the actor computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.tiny import save_tiny_model

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.generation.model_support import check_small_cache_config
from lockstep.workers.policy import ActorPart, choose_rollout, make_rollout_part
from lockstep.workers.rollout import registry


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("model", [{}, {"lora_rank": 2}], ids=["whole", "lora"])
@pytest.mark.parametrize("offload", [False, True])
def test_keys_in_eight_bits_are_checked_for_the_weights_that_generate(
    tmp_path: Path, world_size: int, model: dict[str, Any], offload: bool
) -> None:
    """bfloat16 on the actor's device, whatever its own weights are (float32) and wherever they are (in host memory): on a GPU they pass."""
    path = save_tiny_model(tmp_path, head_dim=32)

    def use() -> list[tuple[str, torch.dtype]]:
        seen = []

        def check(module: Any, rollout: RolloutConfig) -> None:
            check_small_cache_config(module.config, "cuda", module.dtype, rollout)
            seen.append((module.device.type, module.dtype))

        config = ActorRolloutRefConfig(model=ModelConfig(path=path, **model), rollout=RolloutConfig(kv_cache_dtype="fp8"))
        choice = choose_rollout(config.rollout, hybrid=True, cuda=False)
        section = {"dtype": "bfloat16", "param_offload": offload}
        trained = make_tiny_engine(path, section=section, model=model, decoder_attention=choice.attention)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "check_small_cache", check)
            make_rollout_part(
                choice, config, ActorPart(trained, config, torch.bfloat16),
                device=trained.device, dtype=torch.bfloat16, seed=0, pad_token_id=0,
            )  # fmt: skip
        return seen

    assert run_distributed(use, world_size) == [[("cpu", torch.bfloat16)]] * world_size
