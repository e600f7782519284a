"""One rank has the model whole, and computes the very numbers that FSDP2 would, in the type of the computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance import STEPS, TWO_MICRO_BATCHES, batch_of, engine_step
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.families import FAMILIES
from helpers.tiny import save_tiny_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lockstep.models.fast_layers import takes_float_residual
from lockstep.models.load import Head
from lockstep.models.scores import ScoreLayer
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.fsdp import sharding
from lockstep.workers.engine.fsdp.whole_model import WholeModel

LORA = {"lora_rank": 4, "lora_alpha": 8}


def sharded_by_layer(model: PreTrainedModel, dtype: torch.dtype, layers: set[type[nn.Module]]) -> nn.Module:
    """What FSDP2 makes of it."""
    for part in model.modules():
        if type(part) in layers:
            fully_shard(
                part, mp_policy=MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=not takes_float_residual(part))
            )
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))


def bits(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "qwen2 lora"])
def test_updates_are_those_of_fsdp2_to_the_bit(
    tmp_path: Path, family: str, recompute: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *lora = family.split()
    path = save_tiny_model(tmp_path, name, **FAMILIES[name] | {"tie_word_embeddings": True})

    def train() -> list[Tensor]:
        engine: Any = make_tiny_engine(path, dtype="bfloat16", recompute=recompute, model=LORA if lora else None)
        norms = [engine_step(engine, rows, number, TWO_MICRO_BATCHES)[1]["grad_norm"] for number, rows in enumerate(STEPS)]
        columns = engine.forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES)
        moments = [bits(tensor) for _, tensor in engine._export_moments("exp_avg")]
        weights = [bits(tensor) for _, tensor in engine.export_weights()]
        return [torch.tensor(norms), columns.ragged("log_probs").values, *moments, *weights]

    found = run_distributed(train, 1)[0]
    monkeypatch.setattr(sharding, "keep_whole", sharded_by_layer)
    wanted = run_distributed(train, 1)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def copies(engine: TrainEngine) -> list[nn.Parameter]:
    assert isinstance(engine.module, WholeModel)
    return [copied.copy for copied in engine.module._copied]


def test_copies_have_memory_for_the_time_of_a_stage_and_the_optimizer_never_sees_them(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def train() -> None:
        engine = make_tiny_engine(path, dtype="bfloat16")
        own = list(engine.module.parameters())
        seen: list[set[torch.dtype]] = []
        engine.module.register_forward_pre_hook(lambda module, args: seen.append({p.dtype for p in module.parameters()}))
        engine.forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES)
        assert seen == [{torch.float32}, {torch.bfloat16}]  # the first pass makes the copies
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        assert seen[2:] == [{torch.float32}, {torch.bfloat16}]
        assert [id(p) for p in engine.module.parameters()] == [id(p) for p in own]
        assert {p.dtype for p in own} == {torch.float32}
        assert all(copy.untyped_storage().nbytes() == 0 and copy.grad is None for copy in copies(engine))

    run_distributed(train, 1)


def test_what_needs_no_copy_has_none(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    scored = save_tiny_model(tmp_path / "scored", score_head=True)

    def look() -> None:
        assert not isinstance(make_tiny_engine(path).module, WholeModel)
        adapted = make_tiny_engine(path, dtype="bfloat16", model=LORA)
        assert len(copies(adapted)) == sum(p.requires_grad for p in adapted.module.parameters())
        judge = make_tiny_engine(scored, head=Head.SCORE, optim=None, dtype="bfloat16", pad_token_id=0)
        (layer,) = (part for part in judge.module.modules() if isinstance(part, ScoreLayer))
        assert len(copies(judge)) == len(list(judge.module.parameters())) - len(list(layer.parameters()))

    run_distributed(look, 1)
