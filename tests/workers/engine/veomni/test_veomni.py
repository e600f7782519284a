"""The veomni engine against plain PyTorch (helpers/conformance.py), at its tolerances, over layouts of ranks."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.conformance import (
    COLUMN_ATOL,
    STEPS,
    TWO_MICRO_BATCHES,
    WEIGHT_ATOL,
    assert_two_updates_equal_the_reference,
    batch_of,
    engine_run,
    engine_step,
    make_rows,
    reference_columns,
    reference_model,
    reference_run,
    weights_of,
)
from helpers.distributed import run_distributed
from helpers.engines import engine_choice, make_tiny_engine
from helpers.tiny import save_tiny_model, tiny_config
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.models.load import Head
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine import order, packing
from lockstep.workers.engine.packing import Budget
from lockstep.workers.engine.registry import check_engine
from lockstep.workers.engine.veomni import check as veomni_check
from lockstep.workers.engine.veomni.build import quiet_veomni
from lockstep.workers.weight_sync.shared import SharedWeights

with quiet_veomni():  # here once, and not in every rank
    pytest.importorskip("veomni", reason="the package veomni is not installed")
    importlib.import_module("veomni.distributed.torch_parallelize")
    for family in veomni_check.FAMILIES:
        importlib.import_module(f"veomni.models.transformers.{family}.generated.patched_modeling_{family}_gpu")


def sp(size: int, **section: Any) -> dict[str, Any]:
    return {"section": {"ulysses_parallel_size": size, **section}}


TIED = {"tie_word_embeddings": True}
CASES = {
    "one rank": (1, "llama", Head.LANGUAGE_MODEL, {"recompute": "full"}, {}),
    "dp2": (2, "qwen2", Head.LANGUAGE_MODEL, {"recompute": "selective"}, TIED),
    "dp2, two copies": (2, "qwen3", Head.VALUE, {"section": {"fsdp_size": 1}}, TIED),
    "sp2": (2, "qwen3", Head.LANGUAGE_MODEL, sp(2) | {"recompute": "full"}, TIED),
    "sp2 value": (2, "qwen2", Head.VALUE, sp(2), {}),
    "dp2 sp2": (4, "llama", Head.LANGUAGE_MODEL, sp(2), {}),
    "dp2 sp2, two copies": (4, "llama", Head.VALUE, sp(2, fsdp_size=2), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_updates_equal_plain_pytorch(tmp_path: Path, case: str) -> None:
    world, model_type, head, options, changes = CASES[case]
    path = save_tiny_model(tmp_path, model_type, value_head=head is Head.VALUE, **changes)
    assert_two_updates_equal_the_reference(path, "veomni", world, head, options)


def test_rows_that_share_their_prompt_update_like_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights within 5e-5: AdamW turns a gradient that is 0 but for rounding into a step of any size."""
    monkeypatch.setattr(packing, "MIN_SHARED", 1)
    path = save_tiny_model(tmp_path)
    steps = [make_rows(6, seed=3), make_rows(6, seed=4)]
    for rows in steps:
        for again, first in ((1, 0), (2, 0), (4, 3)):
            rows[again]["prompts"] = rows[first]["prompts"]
    assert_two_updates_equal_the_reference(path, "veomni", 2, Head.LANGUAGE_MODEL, sp(2), steps, weight_atol=5e-5)


def test_bf16_computes_near_fp32_and_keeps_fp32_weights(tmp_path: Path) -> None:
    """The bounds of test_conformance.py: log-probs of this model move by up to a few hundredths, the gradient's norm by a few percent."""
    path = save_tiny_model(tmp_path)
    model = reference_model(path, Head.LANGUAGE_MODEL)
    expected = torch.cat([reference_columns(model, Head.LANGUAGE_MODEL, row)["log_probs"].detach() for row in STEPS[0]])
    _, steps = reference_run(path, Head.LANGUAGE_MODEL, STEPS)
    ranks = run_distributed(engine_run, 2, path, "veomni", Head.LANGUAGE_MODEL, STEPS, TWO_MICRO_BATCHES, {"dtype": "bfloat16"})
    columns = DataProto.concat([columns for columns, _, _ in ranks]).ragged("log_probs")
    assert 1e-4 < (columns.values - expected).abs().max() < 0.05
    for _, results, weights in ranks:
        assert results[0][1]["grad_norm"] == pytest.approx(steps[0]["grad_norm"], rel=0.02)
        assert all(tensor.dtype == torch.float32 for tensor in weights.values())


@pytest.mark.parametrize(("world", "model_type", "options"), [(1, "llama", {}), (2, "qwen2", {}), (2, "qwen3", sp(2))])
def test_scores_equal_sequence_classification_one_row_at_a_time(
    tmp_path: Path, world: int, model_type: str, options: dict[str, Any]
) -> None:
    path = save_tiny_model(tmp_path, model_type, score_head=True)
    sequences = [torch.cat([row["prompts"], row["responses"]]) for row in make_rows(5)]
    sequences += [torch.tensor([5, 0, 9]), torch.tensor([5, 9, 0])]  # with the padding token inside and at the end

    def score() -> Tensor:
        engine = make_tiny_engine(path, "veomni", Head.SCORE, optim=None, pad_token_id=0, **options)
        mine = sequences if world == 1 else (sequences[:1] if engine.rank == 0 else sequences[1:])
        return engine.score(Ragged.from_rows(mine), Budget(20), pad_token_id=0)

    scores = torch.cat(run_distributed(score, world))
    model = reference_model(path, Head.SCORE)
    with torch.no_grad():
        expected = torch.stack([model(input_ids=ids[None]).logits[0, 0] for ids in sequences])
    torch.testing.assert_close(scores, expected, atol=COLUMN_ATOL, rtol=0)


def test_a_new_value_head_is_drawn_as_the_other_engines_draw_it(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def draw() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return tuple(weights_of(make_tiny_engine(path, strategy, Head.VALUE)) for strategy in ("veomni", "fsdp2"))  # type: ignore[return-value]

    for ours, theirs in run_distributed(draw, 2):
        assert ours["score.weight"].abs().max() > 0
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _train_and_save(path: str, head: Head, options: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """An update, a checkpoint, one more update; the weights after it."""
    engine = make_tiny_engine(path, "veomni", head, **options)
    engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
    engine.save(folder)
    engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
    return weights_of(engine)


def _load_and_train(path: str, strategy: str, head: Head, options: dict[str, Any], folder: Path, again: Path) -> dict[str, Tensor]:
    """The checkpoint in an engine that starts elsewhere, saved once more, and one update; the weights after it."""
    engine = make_tiny_engine(path, strategy, head, **options)
    engine_step(engine, make_rows(6, seed=9), 0, TWO_MICRO_BATCHES)
    engine.load(folder)
    engine.save(again)
    engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
    return weights_of(engine)


@pytest.mark.parametrize(("head", "changes"), [(Head.LANGUAGE_MODEL, TIED), (Head.VALUE, {})], ids=["tied lm", "value"])
def test_a_checkpoint_continues_in_other_layouts_and_in_another_engine(tmp_path: Path, head: Head, changes: dict[str, Any]) -> None:
    path = save_tiny_model(tmp_path / "model", value_head=head is Head.VALUE, **changes)
    folders = [tmp_path / name for name in ("two", "one", "divided", "other")]
    expected = run_distributed(_train_and_save, 2, path, head, {}, folders[0])[0]
    for number, (strategy, world, options) in enumerate([("veomni", 1, {}), ("veomni", 2, sp(2)), ("fsdp2", 1, {})]):
        weights = run_distributed(_load_and_train, world, path, strategy, head, options, folders[number], folders[number + 1])[0]
        assert set(weights) == set(expected)
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], atol=WEIGHT_ATOL, rtol=0)
    saved = dict(reference_model(str(folders[2]), head).named_parameters())
    first = dict(reference_run(path, head, STEPS[:1])[0].named_parameters())
    for name, tensor in first.items():
        torch.testing.assert_close(saved[name], tensor, atol=WEIGHT_ATOL, rtol=0)


def test_generation_is_each_rank_alone_and_needs_no_veomni(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def decode() -> Tensor:
        engine = make_tiny_engine(path, "veomni", decoder_attention="sdpa", **sp(2))
        assert engine.decoder is not None
        assert type(engine.decoder).__module__.startswith("transformers.")
        with torch.no_grad(), SharedWeights(engine, torch.float32).lent():
            return engine.decoder(input_ids=torch.arange(2, 6)[None]).logits if engine.rank else torch.empty(0)

    _, logits = run_distributed(decode, 2)
    with torch.no_grad():
        expected = reference_model(path, Head.LANGUAGE_MODEL)(input_ids=torch.arange(2, 6)[None]).logits
    torch.testing.assert_close(logits, expected, atol=COLUMN_ATOL, rtol=0)


def test_a_second_engine_has_the_layout_of_the_first_or_is_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def make() -> None:
        make_tiny_engine(path, "veomni", **sp(2))
        make_tiny_engine(path, "veomni", optim=None, **sp(2))
        with pytest.raises(ConfigError, match=r"'ulysses_size': 2.* already, not .*'ulysses_size': 1.*give all models"):
            make_tiny_engine(path, "veomni", optim=None)

    run_distributed(make, 2)


def test_ranks_that_were_taken_down_and_set_up_again_get_a_layout_of_their_own(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def make_twice() -> tuple[DataProto, DataProto]:
        before = make_tiny_engine(path, "veomni").forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES)
        dist.destroy_process_group()
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        return before, make_tiny_engine(path, "veomni").forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES)

    ((before, after),) = run_distributed(make_twice, 1)
    assert torch.equal(before.ragged("log_probs").values, after.ragged("log_probs").values)


def test_weights_that_are_not_safetensors_are_loaded_whole(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    model = reference_model(path, Head.LANGUAGE_MODEL)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    (weights,) = run_distributed(lambda: weights_of(make_tiny_engine(path, "veomni")), 1)
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("section", "family", "world", "words"),
    [
        ({"ulysses_parallel_size": 2}, "llama", 3, r"a\.veomni\.ulysses_parallel_size=2 must divide the 3 ranks"),
        ({"ulysses_parallel_size": 8}, "llama", 8, r"a\.veomni\.ulysses_parallel_size=8 must divide the model's 4 attention heads"),
        ({"fsdp_size": 3}, "llama", 4, r"a\.veomni\.fsdp_size=3 must divide the 4 ranks"),
        (
            {"fsdp_size": 1, "ulysses_parallel_size": 2},
            "qwen3",
            4,
            r"fsdp_size=1 .* multiple of a\.veomni\.ulysses_parallel_size=2",
        ),
        ({}, "mistral", 1, r"llama, qwen2, qwen3, and the model is a mistral; set strategy=fsdp2"),
    ],
)
def test_what_cannot_be_is_refused(section: dict[str, Any], family: str, world: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_engine(engine_choice("veomni", **section), tiny_config(family), world, "cpu", "a")
    check_engine(engine_choice("veomni", fsdp_size=2, ulysses_parallel_size=2), tiny_config(), 4, "cpu")


def test_a_missing_package_is_named_with_its_command_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path)
    monkeypatch.setattr(veomni_check, "find_spec", lambda name: None)
    monkeypatch.setattr(order, "load_on_meta", None)

    def make() -> None:
        with pytest.raises(ConfigError, match=r"needs the package veomni.*pip install --no-deps veomni"):
            make_tiny_engine(path, "veomni")

    run_distributed(make, 1)


def test_nothing_reaches_the_terminal(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    program = f"""
from helpers.engines import engine_choice, make_tiny_engine
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
make_tiny_engine({path!r}, "veomni")
"""
    helpers = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {helpers!r})" + program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
