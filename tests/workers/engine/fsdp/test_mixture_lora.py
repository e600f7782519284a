"""Adapters on mixtures of experts: what all-linear adapts, against peft's own training, and what peft reads of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance import (
    COLUMN_ATOL,
    STEPS,
    TEMPERATURE,
    TWO_MICRO_BATCHES,
    assert_weights_close,
    batch_of,
    engine_step,
    make_rows,
    reference_columns,
    reference_model,
    reference_step,
)
from helpers.engine_properties import LM, Layout, assert_metrics_equal
from helpers.mixtures import MIXTURES
from helpers.tiny import save_tiny_model, tiny_model

from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError
from lockstep.models.lora import Lora

peft = pytest.importorskip("peft")

LORA = {"lora_rank": 4, "lora_alpha": 8}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHARED = ["shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate"]


def peft_run(path: str, layers: list[str]) -> tuple[Any, list[dict[str, float]]]:
    """peft's model trained by plain PyTorch from the adapters that our seed draws; returns it merged."""
    drawn = Lora(reference_model(path, LM), ModelConfig(path=path, **LORA), LM, seed=7).values
    model = peft.get_peft_model(reference_model(path, LM), peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers))
    parameters = dict(model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trained == {f"base_model.model.{name}" for name in drawn}
    with torch.no_grad():
        for name, value in drawn.items():
            parameters[f"base_model.model.{name}"].copy_(value)
    optimizer = torch.optim.AdamW([parameters[name] for name in trained], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    expected = [reference_step(model, LM, optimizer, rows, update) for update, rows in enumerate(STEPS)]
    return model.merge_and_unload(), expected


@pytest.mark.parametrize(
    ("family", "layout", "layers"),
    [("qwen2_moe", Layout("fsdp2", 1), ATTENTION + SHARED), ("olmoe", Layout("fsdp2", 2), ATTENTION)],
)
def test_all_linear_is_attention_and_shared_experts_and_trains_as_peft_does(
    tmp_path: Path, family: str, layout: Layout, layers: list[str]
) -> None:
    path = save_tiny_model(tmp_path, family, **MIXTURES[family])
    model, expected = peft_run(path, layers)
    ranks = layout.train(path, model=LORA)
    assert_metrics_equal(ranks, expected)
    for _, _, weights in ranks:
        assert_weights_close(weights, model)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("dense", [[], [0]])
def test_all_linear_adapts_linear_layers_only(family: str, dense: list[int]) -> None:
    """In layers without experts (Qwen's mlp_only_layers) attention alone."""
    has_dense = bool(dense) and family.startswith("qwen")
    model = tiny_model(family, **MIXTURES[family], **({"mlp_only_layers": dense} if has_dense else {}))
    lora = Lora(model, ModelConfig(path="x", **LORA), LM, seed=0)
    layers = ATTENTION + (SHARED if family == "qwen2_moe" else [])
    found = {name.split(".lora_")[0] for name in lora.trained}
    assert len(found) == 2 * len(layers) - (len(SHARED) if has_dense and family == "qwen2_moe" else 0)
    assert all(any(name.endswith(layer) for layer in layers) for name in found)


def test_experts_and_routers_are_refused_by_name() -> None:
    for name in ("gate", "experts", "gate_proj"):
        with pytest.raises(ConfigError, match=rf"model\.target_modules=\['{name}'\]"):
            Lora(tiny_model("qwen3_moe", **MIXTURES["qwen3_moe"]), ModelConfig(path="x", target_modules=[name], **LORA), LM, seed=0)


def test_a_checkpoint_is_read_by_peft_and_is_a_start(tmp_path: Path) -> None:
    path, saved, row = save_tiny_model(tmp_path / "m", "mixtral", **MIXTURES["mixtral"]), tmp_path / "saved", make_rows(1)[0]

    def train() -> Any:
        engine = Layout().engine(path, model=LORA)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        engine.save(saved)
        return engine.forward(batch_of([row]), TWO_MICRO_BATCHES, TEMPERATURE)

    def start() -> Any:
        engine = Layout().engine(path, model={"lora_adapter_path": str(saved / "adapter")})
        return engine.forward(batch_of([row]), TWO_MICRO_BATCHES, TEMPERATURE)

    (columns,), (again,) = Layout().run(train), Layout().run(start)
    base = reference_model(path, LM)
    for model in (reference_model(str(saved), LM), peft.PeftModel.from_pretrained(base, str(saved / "adapter"))):
        for name, want in reference_columns(model, LM, row).items():
            torch.testing.assert_close(columns.ragged(name)[0], want.detach(), atol=COLUMN_ATOL, rtol=0)
            torch.testing.assert_close(again.ragged(name)[0], want.detach(), atol=COLUMN_ATOL, rtol=0)
