"""LoRA in fsdp and fsdp2, at one and two ranks, against peft's own training in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance import (
    COLUMN_ATOL,
    STEPS,
    TEMPERATURE,
    TWO_MICRO_BATCHES,
    WEIGHT_ATOL,
    assert_weights_close,
    batch_of,
    engine_step,
    make_rows,
    reference_columns,
    reference_model,
    reference_step,
    weights_of,
)
from helpers.distributed import run_distributed
from helpers.engine_properties import Layout, assert_metrics_equal
from helpers.engines import make_tiny_engine
from helpers.tiny import save_tiny_model, tiny_model
from torch import Tensor

from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError, DataError
from lockstep.models.load import Head
from lockstep.models.lora import Lora

peft = pytest.importorskip("peft")

LORA = {"lora_rank": 4, "lora_alpha": 8}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama, 2 ranks": ("llama", Head.LANGUAGE_MODEL, "fsdp2", 2, "full", {}),
    "qwen3 tied, 1 rank": ("qwen3", Head.LANGUAGE_MODEL, "fsdp", 1, None, {"tie_word_embeddings": True}),
    "qwen2 value, 2 ranks": ("qwen2", Head.VALUE, "fsdp", 2, None, {}),
}


def peft_run(path: str, head: Head, steps: list[list[dict[str, Tensor]]]) -> tuple[Any, list[dict[str, float]]]:
    """peft's model with its own wrapper, trained by plain PyTorch from the adapters that our seed draws; returns it merged."""
    drawn = Lora(reference_model(path, head), ModelConfig(path=path, **LORA), head, seed=7).values
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR, modules_to_save=["score"] if head is Head.VALUE else None)
    model = peft.get_peft_model(reference_model(path, head), options)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in drawn.items():
            parameters[f"base_model.model.{name}"].copy_(value)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    expected = [reference_step(model, head, optimizer, rows, update) for update, rows in enumerate(steps)]
    return model.merge_and_unload(), expected


@pytest.mark.parametrize("case", CASES)
def test_two_updates_equal_peft_in_one_process(tmp_path: Path, case: str) -> None:
    model_type, head, strategy, world, recompute, changes = CASES[case]
    path = save_tiny_model(tmp_path, model_type, value_head=head is Head.VALUE, **changes)
    start = reference_model(path, head)
    model, expected = peft_run(path, head, STEPS)
    ranks = Layout(strategy, world).train(path, head, recompute=recompute, model=LORA)
    assert_metrics_equal(ranks, expected)
    for _, _, weights in ranks:
        assert_weights_close(weights, model)
    moved = max((a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert moved > 10 * WEIGHT_ATOL, "the weights hardly moved, so their comparison says nothing"


@pytest.mark.parametrize(("strategy", "head"), [("fsdp", Head.VALUE), ("fsdp2", Head.LANGUAGE_MODEL)])
def test_a_checkpoint_is_a_merged_model_beside_its_adapter_and_continues_exactly(tmp_path: Path, strategy: str, head: Head) -> None:
    path = save_tiny_model(tmp_path / "model", value_head=head is Head.VALUE, tie_word_embeddings=True)
    saved = tmp_path / "saved"
    row = make_rows(1)[0]

    def train() -> tuple[Any, dict[str, Tensor]]:
        engine = make_tiny_engine(path, strategy, head, model=LORA)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        engine.save(saved)
        columns = engine.forward(batch_of([row]), TWO_MICRO_BATCHES, TEMPERATURE)
        engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
        return columns, weights_of(engine)

    def resume() -> dict[str, Tensor]:
        engine = make_tiny_engine(path, strategy, head, model=LORA)
        engine_step(engine, make_rows(6, seed=9), 0, TWO_MICRO_BATCHES)
        engine.load(saved)
        engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
        return weights_of(engine)

    columns, expected = run_distributed(train, 2)[0]
    for again in (run_distributed(resume, 2)[0], run_distributed(resume, 1)[0]):
        assert again.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(again[name], expected[name], atol=WEIGHT_ATOL, rtol=0)
    merged, base = reference_model(str(saved), head), reference_model(path, head)
    for model in (merged, peft.PeftModel.from_pretrained(base, str(saved / "adapter"))):
        for name, want in reference_columns(model, head, row).items():
            torch.testing.assert_close(columns.ragged(name)[0], want.detach(), atol=COLUMN_ATOL, rtol=0)
    assert json.loads((saved / "adapter" / "adapter_config.json").read_text())["r"] == 4


def test_only_adapters_learn_and_without_them_the_model_is_where_it_started(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    start = reference_model(path, Head.LANGUAGE_MODEL)

    def train() -> None:
        engine = make_tiny_engine(path, model=LORA)
        batch = batch_of(STEPS[0])
        for update, rows in enumerate(STEPS):
            engine_step(engine, rows, update, TWO_MICRO_BATCHES)
        adapters = [parameter for name, parameter in engine.module.named_parameters() if ".lora_" in name]
        assert len(adapters) == 2 * 7 * 2
        assert set(engine._optimizer.state) == set(adapters)
        trained = engine.forward(batch, TWO_MICRO_BATCHES, TEMPERATURE).ragged("log_probs").values
        with engine.adapter_off():
            reference = engine.forward(batch, TWO_MICRO_BATCHES, TEMPERATURE).ragged("log_probs").values
        again = engine.forward(batch, TWO_MICRO_BATCHES, TEMPERATURE).ragged("log_probs").values
        wanted = torch.cat([reference_columns(start, Head.LANGUAGE_MODEL, row)["log_probs"].detach() for row in STEPS[0]])
        torch.testing.assert_close(reference, wanted, atol=COLUMN_ATOL, rtol=0)
        assert torch.equal(trained, again)
        assert (trained - reference).abs().max() > 100 * COLUMN_ATOL

    run_distributed(train, 1)


def test_a_checkpoint_that_does_not_fit_the_adapters_is_refused(tmp_path: Path) -> None:
    path, other = save_tiny_model(tmp_path / "model"), save_tiny_model(tmp_path / "other", seed=5)

    def use() -> None:
        plain, adapted = make_tiny_engine(path), make_tiny_engine(path, model=LORA)
        plain.save(tmp_path / "plain")
        adapted.save(tmp_path / "adapted")
        with pytest.raises(DataError, match=r"has no adapter: it was trained with model.lora_rank=0"):
            adapted.load(tmp_path / "plain")
        with pytest.raises(DataError, match=r"was trained with adapters"):
            plain.load(tmp_path / "adapted")
        with pytest.raises(DataError, match=r"has other adapters: .* \(4, 32\) instead of \(2, 32\)"):
            make_tiny_engine(path, model=LORA | {"lora_rank": 2}).load(tmp_path / "adapted")
        with pytest.raises(DataError, match=r"was trained beside another model"):
            make_tiny_engine(other, model=LORA).load(tmp_path / "adapted")

    run_distributed(use, 1)


STARTS = {
    "llama, 2 ranks": (Head.LANGUAGE_MODEL, 2, {"use_rslora": True}),
    "value head, 1 rank": (Head.VALUE, 1, {"modules_to_save": ["score"], "lora_dropout": 0.1}),
}


def save_peft_adapter(path: str, head: Head, folder: Path, **options: Any) -> str:
    """An adapter that has learned something, as peft writes it."""
    model = peft.get_peft_model(
        reference_model(path, head), peft.LoraConfig(r=3, lora_alpha=8, target_modules=LINEAR[:5], **options)
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("case", STARTS)
def test_training_starts_from_an_adapter_as_peft_does_and_what_it_saves_is_a_start(tmp_path: Path, case: str) -> None:
    head, world, options = STARTS[case]
    path, row = save_tiny_model(tmp_path / "model", value_head=head is Head.VALUE), make_rows(1)[0]
    folder = save_peft_adapter(path, head, tmp_path / "theirs", **options)
    base, plain = reference_model(path, head), reference_model(path, head)
    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
    before = reference_columns(model, head, row)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
    expected = [reference_step(model, head, optimizer, rows, update) for update, rows in enumerate(STEPS)]
    after = reference_columns(model, head, row)

    def columns_of(engine: Any) -> Any:
        return engine.forward(batch_of([row]), TWO_MICRO_BATCHES, TEMPERATURE)

    def train() -> tuple[Any, ...]:
        engine = make_tiny_engine(path, head=head, model={"lora_adapter_path": folder})
        first = columns_of(engine)
        with engine.adapter_off():
            reference = columns_of(engine)
        metrics = [engine_step(engine, rows, update, TWO_MICRO_BATCHES) for update, rows in enumerate(STEPS)]
        engine.save(tmp_path / "saved")
        again = make_tiny_engine(path, head=head, model={"lora_adapter_path": str(tmp_path / "saved" / "adapter")})
        return first, reference, columns_of(engine), columns_of(again), metrics

    ranks = run_distributed(train, world)
    assert_metrics_equal([(None, metrics, None) for *_, metrics in ranks], expected)
    for first, reference, trained, again, _ in ranks:
        for name, value in before.items():
            torch.testing.assert_close(first.ragged(name)[0], value.detach(), atol=1e-6, rtol=0)
            torch.testing.assert_close(trained.ragged(name)[0], after[name].detach(), atol=COLUMN_ATOL, rtol=0)
            assert torch.equal(again.ragged(name)[0], trained.ragged(name)[0])
            assert (after[name] - value).abs().max() > 100 * COLUMN_ATOL
        for name, value in reference_columns(plain, head, row).items() if head is Head.LANGUAGE_MODEL else ():
            torch.testing.assert_close(reference.ragged(name)[0], value.detach(), atol=COLUMN_ATOL, rtol=0)
            assert (first.ragged(name)[0] - value).abs().max() > 100 * COLUMN_ATOL


@pytest.mark.parametrize("names", [["q_proj", "v_prj"], ["v_prj"]])
def test_a_name_that_no_layer_has_is_refused_also_beside_one_that_there_is(names: list[str]) -> None:
    """peft would adapt the others without a word."""
    told = r"names v_prj, which no layer of the model is called; its linear layers are q_proj, k_proj, v_proj, o_proj, gate_proj, "
    with pytest.raises(ConfigError, match=told + "up_proj, down_proj$"):
        Lora(tiny_model("llama"), ModelConfig(path="x", lora_rank=2, target_modules=names), Head.LANGUAGE_MODEL, seed=0)


def test_an_adapter_of_another_model_is_refused_by_the_tensors_name_before_weights_are_read(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    others = {
        "shape": save_peft_adapter(save_tiny_model(tmp_path / "a", hidden_size=64), Head.LANGUAGE_MODEL, tmp_path / "wide"),
        "layers": save_peft_adapter(save_tiny_model(tmp_path / "b", num_hidden_layers=3), Head.LANGUAGE_MODEL, tmp_path / "deep"),
        "head": save_peft_adapter(
            save_tiny_model(tmp_path / "c", value_head=True), Head.VALUE, tmp_path / "value", modules_to_save=["score"]
        ),
    }
    told = {
        "shape": r"layers\.0\.\S*lora_A\.weight has shape \(3, 64\) there and \(3, 32\) here",
        "layers": r"layers\.2\.\S+ has shape \(.*\) there and none here",
        "head": r"score\.bias has shape \(1,\) there and none here",
    }
    weights = Path(path) / "model.safetensors"
    whole = weights.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    weights.write_bytes(whole[:start] + b"\xff" * (len(whole) - start))  # NaN: an error of its own, were they read

    def use() -> None:
        for kind, folder in others.items():
            with pytest.raises(DataError, match=told[kind]):
                make_tiny_engine(path, model={"lora_adapter_path": folder})

    run_distributed(use, 1)
