"""fsdp and fsdp2, at one and two ranks, against plain PyTorch (helpers/conformance.py)."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance import (
    ACTOR,
    COLUMN_ATOL,
    GRAD_NORM_RTOL,
    METRIC_ATOL,
    STEPS,
    TEMPERATURE,
    TWO_MICRO_BATCHES,
    WEIGHT_ATOL,
    assert_two_updates_equal_the_reference,
    assert_weights_close,
    batch_of,
    denominators_of,
    engine_run,
    engine_step,
    make_rows,
    reference_columns,
    reference_model,
    reference_run,
    weights_of,
)
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.tiny import save_tiny_model
from torch import Tensor

from lockstep.errors import DataError, NumericalError
from lockstep.models.compile import compile_layers
from lockstep.models.load import Head
from lockstep.models.meta import WeightFiles
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine import packing
from lockstep.workers.engine.base import TokenOutputs
from lockstep.workers.engine.fsdp import engine as fsdp_engine
from lockstep.workers.engine.fsdp import make as fsdp_make
from lockstep.workers.engine.optim import move_state
from lockstep.workers.engine.packing import Budget
from lockstep.workers.losses import make_policy_loss

STRATEGIES = ("fsdp", "fsdp2")
WORLDS = (1, 2)

CASES = {
    "llama": ("llama", Head.LANGUAGE_MODEL, {"recompute": "full"}, {}),
    "llama tied": ("llama", Head.LANGUAGE_MODEL, {}, {"tie_word_embeddings": True}),
    "qwen2 tied": ("qwen2", Head.LANGUAGE_MODEL, {"recompute": "selective"}, {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", Head.LANGUAGE_MODEL, {"section": {"reshard_after_forward": False}}, {}),
    "llama value": ("llama", Head.VALUE, {"recompute": "full"}, {}),
    "qwen2 value": ("qwen2", Head.VALUE, {"section": {"reshard_after_forward": False}}, {}),
    "qwen3 value tied": ("qwen3", Head.VALUE, {}, {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_two_updates_equal_plain_pytorch(tmp_path: Path, case: str, strategy: str, world: int) -> None:
    model_type, head, options, changes = CASES[case]
    path = save_tiny_model(tmp_path, model_type, value_head=head is Head.VALUE, **changes)
    start = reference_model(path, head)
    expected_columns = [reference_columns(start, head, row) for row in STEPS[0]]
    model, expected = reference_run(path, head, STEPS)

    ranks = run_distributed(engine_run, world, path, strategy, head, STEPS, TWO_MICRO_BATCHES, options)

    columns = DataProto.concat([columns for columns, _, _ in ranks])
    for name in expected_columns[0]:
        for row, want in zip(columns.ragged(name).rows(), expected_columns, strict=True):
            torch.testing.assert_close(row, want[name].detach(), atol=COLUMN_ATOL, rtol=0)
    for update, want in enumerate(expected):
        metrics = values(merge_metrics([results[update][0] for _, results, _ in ranks]))
        for name, number in want.items():
            if name not in ("grad_norm", "lr"):
                assert metrics[name] == pytest.approx(number, abs=METRIC_ATOL), name
        for _, results, _ in ranks:
            assert results[update][1]["grad_norm"] == pytest.approx(want["grad_norm"], rel=GRAD_NORM_RTOL)
            assert results[update][1]["lr"] == pytest.approx(want["lr"], rel=1e-12)
    for _, _, weights in ranks:
        assert_weights_close(weights, model)
    moved = max((a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert moved > 10 * WEIGHT_ATOL, "the weights hardly moved, so their comparison says nothing"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_micro_batch_budget_never_changes_an_update(tmp_path: Path, strategy: str, world: int) -> None:
    path = save_tiny_model(tmp_path)
    model, expected = reference_run(path, Head.LANGUAGE_MODEL, STEPS)
    for budget in (Budget(10_000, 1), Budget(10_000), Budget(14)):
        for _, results, weights in run_distributed(engine_run, world, path, strategy, Head.LANGUAGE_MODEL, STEPS, budget, {}):
            assert_weights_close(weights, model)
            assert [r["grad_norm"] for _, r in results] == pytest.approx([e["grad_norm"] for e in expected], rel=GRAD_NORM_RTOL)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_copies_of_the_model_learn_as_one(tmp_path: Path, strategy: str) -> None:
    """With a shard size of 1 FSDP1's own hybrid strategy reduces no gradient; the copies would be two models."""
    path = save_tiny_model(tmp_path)
    model, expected = reference_run(path, Head.LANGUAGE_MODEL, STEPS)
    options = {"section": {"fsdp_size": 1}}
    for _, results, weights in run_distributed(
        engine_run, 2, path, strategy, Head.LANGUAGE_MODEL, STEPS, TWO_MICRO_BATCHES, options
    ):
        assert_weights_close(weights, model)
        assert [r["grad_norm"] for _, r in results] == pytest.approx([e["grad_norm"] for e in expected], rel=GRAD_NORM_RTOL)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_that_stay_gathered_between_forward_and_backward_learn_the_same(tmp_path: Path, strategy: str) -> None:
    """A forward pass without a backward pass must not leave the optimizer, or an export, with anything but the shards."""
    path = save_tiny_model(tmp_path)
    options = {"section": {"reshard_after_forward": False}}
    assert_two_updates_equal_the_reference(path, strategy, 2, Head.LANGUAGE_MODEL, options)
    whole = {name: tensor.detach() for name, tensor in reference_model(path, Head.LANGUAGE_MODEL).named_parameters()}

    def export() -> dict[str, Tensor]:
        engine = make_tiny_engine(path, strategy, **options)
        engine.forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES)
        return weights_of(engine)

    for weights in run_distributed(export, 2):
        assert all(torch.equal(weights[name], whole[name]) for name in whole)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offloaded_moments_are_on_the_device_for_the_step_and_on_the_host_after_it(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU device and host are one, so what is checked is that the moves happen, around an update that stays the same."""
    path = save_tiny_model(tmp_path)
    model, _ = reference_run(path, Head.LANGUAGE_MODEL, STEPS)
    moves: list[torch.device] = []

    def moved(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        moves.append(device)
        move_state(optimizer, device)

    monkeypatch.setattr(fsdp_engine, "move_state", moved)

    def train() -> tuple[int, dict[str, Tensor]]:
        engine = make_tiny_engine(path, strategy, section={"optimizer_offload": True})
        for update, rows in enumerate(STEPS):
            engine_step(engine, rows, update, TWO_MICRO_BATCHES)
        return len(moves), weights_of(engine)

    for count, weights in run_distributed(train, 2):
        assert count == 2 * len(STEPS)
        assert_weights_close(weights, model)


def test_compiled_layers_update_like_plain_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and sharded, but run by torch without its code generator, which would take a minute."""
    monkeypatch.setattr(fsdp_make, "compile_layers", functools.partial(compile_layers, backend="eager"))
    path = save_tiny_model(tmp_path, num_hidden_layers=1)
    model, _ = reference_run(path, Head.LANGUAGE_MODEL, STEPS[:1])

    def train() -> dict[str, Tensor]:
        engine = make_tiny_engine(path, section={"use_torch_compile": True})
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        return weights_of(engine)

    assert_weights_close(run_distributed(train, 1)[0], model)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("head", [Head.LANGUAGE_MODEL, Head.VALUE])
def test_rows_that_share_their_prompt_update_like_rows_alone(
    tmp_path: Path, head: Head, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights within 5e-5 of updates of about 2e-3: AdamW turns a gradient that is 0 but for rounding into a step of any size."""
    monkeypatch.setattr(packing, "MIN_SHARED", 1)
    path = save_tiny_model(tmp_path, value_head=head is Head.VALUE)
    steps = [make_rows(6, seed=3), make_rows(6, seed=4)]
    for rows in steps:
        for again, first in ((1, 0), (2, 0), (4, 3)):
            rows[again]["prompts"] = rows[first]["prompts"]
    model, expected = reference_run(path, head, steps)
    wanted = [reference_columns(reference_model(path, head), head, row) for row in steps[0]]
    ranks = run_distributed(engine_run, world, path, "fsdp2", head, steps, TWO_MICRO_BATCHES, {})
    columns = DataProto.concat([columns for columns, _, _ in ranks])
    for name in wanted[0]:
        torch.testing.assert_close(
            columns.ragged(name).values, torch.cat([w[name].detach() for w in wanted]), atol=COLUMN_ATOL, rtol=0
        )
    for _, results, weights in ranks:
        assert_weights_close(weights, model, atol=5e-5)
        assert [r["grad_norm"] for _, r in results] == pytest.approx([e["grad_norm"] for e in expected], rel=GRAD_NORM_RTOL)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_scores_equal_sequence_classification_one_row_at_a_time(tmp_path: Path, model_type: str, strategy: str, world: int) -> None:
    path = save_tiny_model(tmp_path, model_type, score_head=True)
    sequences = [torch.cat([row["prompts"], row["responses"]]) for row in make_rows(5)]
    sequences += [torch.tensor([5, 0, 9]), torch.tensor([5, 9, 0])]  # with the padding token inside and at the end

    def score() -> Tensor:
        engine = make_tiny_engine(path, strategy, Head.SCORE, optim=None, pad_token_id=0)
        mine = sequences if world == 1 else (sequences[:1] if engine.rank == 0 else sequences[1:])
        nothing = engine.score(Ragged.from_rows([], dtype=torch.int64), Budget(20), pad_token_id=0)
        assert nothing.shape == (0,)
        return engine.score(Ragged.from_rows(mine), Budget(20), pad_token_id=0)

    scores = torch.cat(run_distributed(score, world))
    model = reference_model(path, Head.SCORE)
    with torch.no_grad():
        expected = torch.stack([model(input_ids=ids[None]).logits[0, 0] for ids in sequences])
    torch.testing.assert_close(scores, expected, atol=COLUMN_ATOL, rtol=0)


def _train_and_save(path: str, strategy: str, head: Head, before: int, folder: Path) -> dict[str, Tensor]:
    """`before` updates, a checkpoint, one more update; the weights after it."""
    engine = make_tiny_engine(path, strategy, head)
    for update in range(before):
        engine_step(engine, STEPS[update], update, TWO_MICRO_BATCHES)
    engine.save(folder)
    engine_step(engine, STEPS[before], before, TWO_MICRO_BATCHES)
    return weights_of(engine)


def _load_and_train(path: str, strategy: str, head: Head, update: int, folder: Path, again: Path) -> dict[str, Tensor]:
    """The checkpoint in an engine that starts elsewhere, saved once more, and one update; the weights after it."""
    engine = make_tiny_engine(path, strategy, head)
    engine_step(engine, make_rows(6, seed=9), 0, TWO_MICRO_BATCHES)
    engine.load(folder)
    engine.save(again)
    engine_step(engine, STEPS[update], update, TWO_MICRO_BATCHES)
    return weights_of(engine)


@pytest.mark.parametrize(
    ("strategy", "other"), [("fsdp", "fsdp"), ("fsdp2", "fsdp2"), ("fsdp", "fsdp2")], ids=["fsdp", "fsdp2", "fsdp to fsdp2"]
)
@pytest.mark.parametrize(("head", "tied"), [(Head.LANGUAGE_MODEL, True), (Head.VALUE, False)], ids=["tied lm", "value"])
def test_a_checkpoint_of_two_ranks_continues_on_one_and_back(
    tmp_path: Path, strategy: str, other: str, head: Head, tied: bool
) -> None:
    path = save_tiny_model(tmp_path / "model", value_head=head is Head.VALUE, tie_word_embeddings=tied)
    two, one, back = tmp_path / "two", tmp_path / "one", tmp_path / "back"
    expected = run_distributed(_train_and_save, 2, path, strategy, head, 1, two)[0]
    on_one = run_distributed(_load_and_train, 1, path, other, head, 1, two, one)[0]
    on_two = run_distributed(_load_and_train, 2, path, strategy, head, 1, one, back)[0]
    for weights in (on_one, on_two):
        assert set(weights) == set(expected)
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], atol=WEIGHT_ATOL, rtol=0)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("head", [Head.LANGUAGE_MODEL, Head.VALUE])
def test_a_checkpoint_is_a_hugging_face_folder(tmp_path: Path, head: Head, strategy: str, world: int) -> None:
    path = save_tiny_model(
        tmp_path / "model", "qwen2", value_head=head is Head.VALUE, tie_word_embeddings=head is Head.LANGUAGE_MODEL
    )
    row = make_rows(1)[0]

    def train() -> DataProto:
        engine = make_tiny_engine(path, strategy, head)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        engine.save(tmp_path / "saved")
        return engine.forward(batch_of([row]), TWO_MICRO_BATCHES, TEMPERATURE)

    columns = run_distributed(train, world)[0]
    expected = reference_columns(reference_model(str(tmp_path / "saved"), head), head, row)
    for name, values_of_row in expected.items():
        torch.testing.assert_close(columns.ragged(name)[0], values_of_row.detach(), atol=COLUMN_ATOL, rtol=0)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_computes_near_fp32_and_keeps_fp32_weights(tmp_path: Path, strategy: str, world: int) -> None:
    """bfloat16 has 8 significant bits: log-probs of this model move by up to a few hundredths, the gradient's norm by a few percent."""
    path = save_tiny_model(tmp_path)
    model = reference_model(path, Head.LANGUAGE_MODEL)
    expected_columns = [reference_columns(model, Head.LANGUAGE_MODEL, row) for row in STEPS[0]]
    _, expected = reference_run(path, Head.LANGUAGE_MODEL, STEPS)
    ranks = run_distributed(engine_run, world, path, strategy, Head.LANGUAGE_MODEL, STEPS, TWO_MICRO_BATCHES, {"dtype": "bfloat16"})
    columns = DataProto.concat([columns for columns, _, _ in ranks]).ragged("log_probs")
    differences = columns.values - torch.cat([want["log_probs"].detach() for want in expected_columns])
    assert 1e-4 < differences.abs().max() < 0.05
    for _, results, weights in ranks:
        assert results[0][1]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=0.02)
        assert all(tensor.dtype == torch.float32 for tensor in weights.values())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_not_finite_changes_no_weight_and_leaves_no_gradient(tmp_path: Path, strategy: str, world: int) -> None:
    """The failed step is as if it had never been: the next one equals the reference's first."""
    path = save_tiny_model(tmp_path)
    model, _ = reference_run(path, Head.LANGUAGE_MODEL, STEPS[:1])

    def poisoned(outputs: TokenOutputs, rows: DataProto) -> tuple[Tensor, dict[str, Any]]:
        # sqrt has a finite value and an infinite derivative at 0; the product with 0 is a NaN gradient of a finite loss.
        return torch.sqrt(outputs.log_probs.sum() * 0.0), {}

    def train() -> tuple[str, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        engine = make_tiny_engine(path, strategy)
        before = weights_of(engine)
        engine.forward_backward(batch_of(STEPS[0]), poisoned, TWO_MICRO_BATCHES)
        with pytest.raises(NumericalError) as error:
            engine.optim_step()
        after = weights_of(engine)
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        return str(error.value), before, after, weights_of(engine)

    for message, before, after, trained in run_distributed(train, world):
        assert "gradient norm is nan at update 0" in message
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert_weights_close(trained, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_that_is_not_finite_names_its_rows_and_changes_no_weight(tmp_path: Path, strategy: str) -> None:
    path = save_tiny_model(tmp_path)

    def train() -> tuple[str, bool]:
        engine = make_tiny_engine(path, strategy)
        before = weights_of(engine)
        rows = make_rows(6)
        rows[4]["advantages"][0] = math.nan
        data = batch_of(rows).union(DataProto.from_dict(non_tensors={"index": list(range(100, 106))}))
        with pytest.raises(NumericalError) as error:
            engine.forward_backward(data, make_policy_loss(ACTOR, denominators_of(rows), 1.0), Budget(10_000, 2))
        after = weights_of(engine)
        return str(error.value), all(torch.equal(before[name], after[name]) for name in before)

    ((message, unchanged),) = run_distributed(train, 1)
    assert "dataset rows [104]" in message
    assert unchanged


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_engine_has_no_optimizer_and_saves_and_loads_without_one(tmp_path: Path, strategy: str) -> None:
    path = save_tiny_model(tmp_path / "model")

    def use() -> bool:
        engine = make_tiny_engine(path, strategy, optim=None)
        assert not any(parameter.requires_grad for parameter in engine.module.parameters())
        with pytest.raises(AssertionError, match="frozen"):
            engine.optim_step()
        engine.save(tmp_path / "saved")
        engine.load(tmp_path / "saved")
        return engine.forward(batch_of(STEPS[0]), TWO_MICRO_BATCHES).ragged("log_probs").values.requires_grad

    assert run_distributed(use, 1) == [False]
    assert not (tmp_path / "saved" / "optimizer").exists()


def test_a_folder_without_weights_is_not_a_checkpoint(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")

    def load() -> None:
        with pytest.raises(DataError, match=r"model.safetensors is missing"):
            make_tiny_engine(path).load(tmp_path)

    run_distributed(load, 1)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    path, other = save_tiny_model(tmp_path / "model"), save_tiny_model(tmp_path / "other", intermediate_size=40)

    def load() -> None:
        with pytest.raises(DataError, match=r"another architecture: 6 of 21 weights.*mlp.*\(40, 32\) instead of \(48, 32\)"):
            make_tiny_engine(path).load(Path(other))

    run_distributed(load, 1)


@pytest.mark.parametrize("head", [Head.LANGUAGE_MODEL, Head.VALUE, Head.SCORE])
def test_a_rank_reads_its_own_part_of_the_weights_and_nothing_else(
    tmp_path: Path, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, value_head=head is Head.VALUE, score_head=head is Head.SCORE)
    whole = {name: tensor.detach() for name, tensor in reference_model(path, head).named_parameters()}
    read: list[int] = []
    original = WeightFiles.read

    def counted(files: WeightFiles, name: str, start: int, stop: int) -> Tensor:
        rows = original(files, name, start, stop)
        read.append(rows.numel())
        return rows

    monkeypatch.setattr(WeightFiles, "read", counted)

    def make() -> tuple[int, dict[str, Tensor]]:
        engine = make_tiny_engine(path, "fsdp2", head, pad_token_id=0)
        return sum(read), weights_of(engine)

    ranks = run_distributed(make, 2)
    total = sum(tensor.numel() for tensor in whole.values())
    assert sum(numbers for numbers, _ in ranks) == total
    assert all(0.4 * total < numbers < 0.6 * total for numbers, _ in ranks)
    for _, weights in ranks:
        assert weights.keys() == whole.keys()
        assert all(torch.equal(weights[name], whole[name]) for name in whole)
