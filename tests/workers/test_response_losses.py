"""A preference loss as engines call it, against dense logits in plain PyTorch, and whatever the cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import engine_properties as properties
from helpers.conformance import COLUMN_ATOL, reference_model, weights_of
from helpers.engine_properties import LM, SCORE, Layout
from helpers.pairs import (
    NLL_COEF,
    WHOLE,
    assert_pairs_learn_as_in_plain_pytorch,
    denominators,
    make_pairs,
    preference_loss,
    reference_loss,
    row_log_prob,
)
from helpers.scores import assert_scores_learn_as_in_plain_pytorch, make_scored_pairs
from helpers.tiny import save_tiny_model, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.preference_losses import PREFERENCE_LOSSES
from lockstep.algorithms.rows import Rows
from lockstep.errors import NumericalError
from lockstep.models import chunked_head, packing
from lockstep.models.chunked_head import TokenOutputs
from lockstep.models.packing import Budget, TokenRows, token_rows
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto
from lockstep.workers.engine.dtensor import whole_tensor
from lockstep.workers.engine.pending import read
from lockstep.workers.response_losses import NUM_BINS, make_preference_loss, make_reward_loss
from lockstep.workers.training_worker import score_rows

VOCABULARY = 32


@pytest.fixture(autouse=True)
def every_prompt_is_worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_SHARED", 1)
    monkeypatch.setattr(packing, "MAX_LONGER", 1 << 30)


def evaluate(loss_fn: Any, data: DataProto, log_probs: Tensor, parts: list[list[int]]) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient by log-probs [M] and metrics, with the rows cut into `parts`."""
    leaf = log_probs.clone().requires_grad_()
    by_row = data.ragged("responses").like(leaf).rows()
    total, found = 0.0, []
    for part in parts:
        outputs = TokenOutputs(torch.cat([by_row[row] for row in part]))
        output = loss_fn(outputs, token_rows(data.select_idxs(part), torch.device("cpu")))
        output.loss.backward(retain_graph=True)
        total += output.loss.item()
        found.append(output)
    assert leaf.grad is not None
    return total, leaf.grad, values(merge_metrics(read(found)))


@pytest.mark.parametrize("mode", PREFERENCE_LOSSES)
@settings(max_examples=10, deadline=None)
@given(pairs=st.integers(1, 5), cut=st.integers(0, 5), seed=st.integers(0, 99))
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(mode: str, pairs: int, cut: int, seed: int) -> None:
    data = make_pairs(pairs, seed)
    data.set("kl", torch.full((len(data),), 0.3, dtype=torch.float64))
    log_probs = -3 * torch.rand(len(data.ragged("responses").values), generator=torch.Generator().manual_seed(seed)).double()
    rows, at = list(range(2 * pairs)), min(2 * cut, 2 * pairs)
    loss_fn = preference_loss(data, mode)
    whole = evaluate(loss_fn, data, log_probs, [rows])
    parts = evaluate(loss_fn, data, log_probs, [part for part in (rows[at:], rows[:at]) if part])
    assert parts[0] == pytest.approx(whole[0], abs=1e-12)
    torch.testing.assert_close(parts[1], whole[1], atol=1e-12, rtol=0)
    assert parts[2] == pytest.approx(whole[2], abs=1e-12, nan_ok=True)


def test_metrics_are_those_of_the_whole_mini_batch(tmp_path: Path) -> None:
    data = make_pairs(3, seed=4)
    model = reference_model(save_tiny_model(tmp_path), LM, torch.float64)
    with torch.no_grad():
        rows = [row_log_prob(model, data, row) for row in range(6)]
    flat = torch.zeros(len(data.ragged("responses").values), dtype=torch.float64)
    flat[data.ragged("response_mask").values.bool()] = torch.cat(rows)
    loss_fn = make_preference_loss("train", "sigmoid", {"beta": 0.5}).of(denominators(data))
    _, _, metrics = evaluate(loss_fn, data, flat, [[0, 1], [2, 3, 4, 5]])
    sums, means = [row.sum().item() for row in rows], [row.mean().item() for row in rows]
    reference = data.columns["ref_response_log_prob"].tolist()
    rewards = [0.5 * (a - b) for a, b in zip(sums, reference, strict=True)]
    gaps = [rewards[i] - rewards[i + 1] for i in (0, 2, 4)]
    assert metrics == pytest.approx(
        {
            "train/loss": sum(math.log1p(math.exp(-gap)) for gap in gaps) / 3,
            "train/nll": -sum(means[::2]) / 3,
            "train/accuracy": sum(gap > 0 for gap in gaps) / 3,
            "train/chosen_log_prob": sum(sums[::2]) / 3,
            "train/rejected_log_prob": sum(sums[1::2]) / 3,
            "train/chosen_log_prob_mean": sum(means[::2]) / 3,
            "train/rejected_log_prob_mean": sum(means[1::2]) / 3,
            "train/chosen_reward": sum(rewards[::2]) / 3,
            "train/rejected_reward": sum(rewards[1::2]) / 3,
        },
        rel=1e-9,
    )


@pytest.mark.parametrize(("mode", "start"), [("sigmoid", math.log(2)), ("ipo", 25.0), ("hinge", 1.0), ("kto", 0.5)])
def test_the_first_loss_is_known_and_equal_responses_are_half_right(mode: str, start: float) -> None:
    data = make_pairs(4)
    log_probs = -3 * torch.rand(len(data.ragged("responses").values), generator=torch.Generator().manual_seed(3))
    mask = data.ragged("response_mask").values.bool()
    sums = [float(row.double().sum()) for row in data.ragged("responses").like(torch.where(mask, log_probs, 0.0)).rows()]
    rounding = 1e-7 * torch.tensor([1, -1] * 4, dtype=torch.float64)  # as the cut into micro-batches makes it
    data.set("ref_response_log_prob", torch.tensor(sums, dtype=torch.float64) + rounding)
    data.set("kl", torch.zeros(8, dtype=torch.float64))
    loss_fn = make_preference_loss("train", mode, {}).of(denominators(data))
    loss, _, metrics = evaluate(loss_fn, data, log_probs, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert loss == pytest.approx(start, rel=1e-6)
    assert metrics["train/accuracy"] == 0.5


def test_masked_tokens_are_not_read_and_a_log_prob_that_is_not_finite_names_its_row() -> None:
    data = make_pairs(2, seed=1)
    mask = data.ragged("response_mask").values.bool()
    assert not mask.all()
    log_probs = torch.where(mask, -torch.ones(len(mask)), torch.nan)
    _, gradient, _ = evaluate(preference_loss(data), data, log_probs, [[0, 1, 2, 3]])
    assert gradient.isfinite().all()
    log_probs[-1] = -torch.inf
    with pytest.raises(NumericalError, match=r"log-probs: not finite in the update for 1 rows; dataset rows \[3\]"):
        evaluate(preference_loss(data), data, log_probs, [[0, 1, 2, 3]])


@pytest.mark.parametrize("at_once", [None, 12, 5])
def test_loss_and_gradient_equal_dense_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int | None) -> None:
    """All logits at once, a chunk of whole pairs at a time, and pairs with more tokens than may have logits; float32 to 2e-6."""
    path, data = save_tiny_model(tmp_path), make_pairs()
    if at_once is not None:
        monkeypatch.setitem(chunked_head.MAX_LOGITS, "cpu", at_once * VOCABULARY)
    model = reference_model(path, LM)
    loss = reference_loss(model, data)
    loss.backward()

    def update() -> tuple[Any, dict[str, Tensor]]:
        engine = Layout("fsdp2").engine(path)
        metrics = engine.forward_backward(data, preference_loss(data), Budget(60))
        return metrics, {name: whole_tensor(parameter.grad).clone() for name, parameter in engine.module.named_parameters()}

    ((metrics, gradients),) = Layout("fsdp2").run(update)
    assert values(metrics)["train/loss"] == pytest.approx(loss.item(), abs=2e-6)
    assert values(metrics)["train/nll"] * NLL_COEF < loss.item()
    largest = max(parameter.grad.abs().max() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-6 * float(largest), rtol=0)


@pytest.mark.parametrize(("strategy", "world"), [("fsdp", 2), ("fsdp2", 1), ("fsdp2", 2)])
def test_an_update_on_pairs_equals_plain_pytorch(tmp_path: Path, strategy: str, world: int) -> None:
    assert_pairs_learn_as_in_plain_pytorch(Layout(strategy, world), save_tiny_model(tmp_path), (WHOLE, Budget(25), Budget(999, 2)))


LAYOUTS = {
    "fsdp, 2": Layout("fsdp", 2),
    "fsdp2, 1": Layout("fsdp2", 1),
    "fsdp2, 2": Layout("fsdp2", 2),
    "fsdp2 tp2": Layout("fsdp2", 2, {"tensor_parallel_size": 2}),
    "fsdp2 sp2": Layout("fsdp2", 2, {"ulysses_sequence_parallel_size": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_equals_plain_pytorch_whatever_the_cut(tmp_path: Path, layout: str) -> None:
    path = save_tiny_model(tmp_path, "qwen2" if layout == "fsdp2, 2" else "llama", score_head=True)
    assert_scores_learn_as_in_plain_pytorch(LAYOUTS[layout], path, (WHOLE, Budget(25), Budget(999, 2)))


def test_a_prompt_that_a_pair_shares_is_computed_once_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MIN_SHARED", 1)
    monkeypatch.setattr(packing, "MAX_LONGER", 1 << 30)
    assert_scores_learn_as_in_plain_pytorch(Layout(), save_tiny_model(tmp_path, score_head=True), recompute="full")


@pytest.mark.parametrize("layout", ["fsdp, 2", "fsdp2, 2", "fsdp2 tp2"])
def test_a_causal_folder_gets_a_head_from_the_seed(tmp_path: Path, layout: str) -> None:
    path = save_tiny_model(tmp_path)
    properties.assert_a_missing_head_is_drawn_from_the_seed(LAYOUTS[layout], path, SCORE)

    def head() -> Tensor:
        return weights_of(LAYOUTS[layout].engine(path, SCORE))["score.weight"]

    weight = LAYOUTS[layout].run(head)[0]
    assert weight.std().item() == pytest.approx(1 / 33, rel=0.4)  # 32 numbers, of a spread of 1 / (hidden size + 1)


def test_adapters_train_the_head_too_and_the_folder_scores_the_same_in_transformers(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    path, data = save_tiny_model(tmp_path / "model"), make_scored_pairs()
    layout = Layout("fsdp2", 2)

    def train() -> Tensor:
        engine = layout.engine(path, SCORE, model={"lora_rank": 4, "lora_alpha": 8}, pad_token_id=0)
        start = weights_of(engine)["score.weight"]
        mine = data if engine.rank == 0 else data.select_idxs(torch.empty(0, dtype=torch.int64))
        for _ in range(3):
            engine.forward_backward(mine, make_reward_loss("train", 0.0).of(denominators(data)), WHOLE)
            engine.optim_step()
        engine.save(tmp_path / "saved")
        assert not torch.equal(weights_of(engine)["score.weight"], start)
        rows = DataProto.from_dict({"input_ids": data.ragged("prompts")})
        return score_rows(engine, rows.ragged("input_ids"), WHOLE, pad_token_id=0)

    scores = layout.run(train)[0]
    merged = reference_model(str(tmp_path / "saved"), SCORE)
    assert merged.config.num_labels == 1
    assert merged.config.pad_token_id == 0
    assert merged.config.architectures == ["LlamaForSequenceClassification"]
    prompts = [row[None] for row in data.ragged("prompts").rows()]
    beside = peft.PeftModel.from_pretrained(_base(path), str(tmp_path / "saved" / "adapter"))
    for model in (merged, beside):
        with torch.no_grad():
            expected = torch.stack([model(input_ids=row).logits[0, 0] for row in prompts])
        torch.testing.assert_close(scores, expected, atol=COLUMN_ATOL, rtol=0)


def _base(path: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)


def pair_loss(scores: list[float], coefficient: float = 0.0) -> dict[str, float]:
    rows = Rows(torch.full((len(scores),), 2))
    tokens = TokenRows(rows, {}, list(range(len(scores))), {"margin": torch.zeros(len(scores))})
    outputs = TokenOutputs(scores=torch.tensor(scores, dtype=torch.float32, requires_grad=True))
    output = make_reward_loss("train", coefficient).of(Denominators(2 * len(scores), len(scores)))(outputs, tokens)
    return values(merge_metrics(read([output])))


def test_the_bins_say_how_far_confidence_is_from_the_share_that_is_right() -> None:
    """Four pairs of confidence 0.731, three of them right, in bin 4; a tie of confidence 0.5, half right, in bin 0."""
    found = pair_loss([1, 0, 2, 1, 0, 1, 5, 4, 3, 3])
    assert found["train/accuracy"] == pytest.approx(3.5 / 5)
    confidence = torch.tensor(1.0).sigmoid().item()
    expected = [0.0] * NUM_BINS
    expected[4] = 4 * confidence - 3
    assert [found[f"train/bin/{i}"] for i in range(NUM_BINS)] == pytest.approx(expected, abs=1e-6)


def test_a_score_that_is_not_finite_names_its_row() -> None:
    with pytest.raises(NumericalError, match=r"scores: not finite in the update for 1 rows; dataset rows \[2\]"):
        pair_loss([1, 0, float("nan"), 1])


@pytest.mark.parametrize(("strategy", "world"), [("fsdp", 2), ("fsdp2", 1), ("fsdp2", 2)])
def test_in_bf16_the_head_is_float32(tmp_path: Path, strategy: str, world: int) -> None:
    """Its weights and what it gives: 0.1 is another number in bfloat16, and scores of bfloat16 come in steps of 2^-8 of their size."""
    layout, data = Layout(strategy, world), make_scored_pairs()

    def train(path: str) -> Tensor:
        engine = layout.engine(path, SCORE, pad_token_id=0, dtype="bfloat16")
        mine = data if engine.rank == 0 else data.select_idxs(torch.empty(0, dtype=torch.int64))
        scores = score_rows(engine, mine.ragged("prompts"), WHOLE, pad_token_id=0)
        engine.forward_backward(mine, make_reward_loss("train", 0.0).of(denominators(data)), WHOLE)
        assert engine.optim_step().grad_norm > 0
        return scores

    found, rounded = [], torch.tensor(0.1).bfloat16().item()
    for name, weight in (("exact", 0.1), ("rounded", rounded)):
        model = tiny_model(score_head=True)
        torch.nn.init.constant_(model.score.weight, weight)
        model.save_pretrained(tmp_path / name)
        found.append(layout.run(train, str(tmp_path / name))[0])
    assert not torch.equal(found[0], found[0].bfloat16().float())
    torch.testing.assert_close(found[1] / found[0], torch.full_like(found[0], rounded / 0.1), atol=1e-5, rtol=0)
