"""A preference loss as engines call it, against dense logits in plain PyTorch, and whatever the cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance import reference_model
from helpers.engine_properties import LM, Layout
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
from helpers.tiny import save_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algorithms.preference_losses import PREFERENCE_LOSSES
from lockstep.errors import NumericalError
from lockstep.models import chunked_head, packing
from lockstep.models.packing import Budget, token_rows
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto
from lockstep.workers.engine.base import TokenOutputs
from lockstep.workers.engine.pending import read
from lockstep.workers.engine.sharded import whole_tensor
from lockstep.workers.preference_loss import make_preference_loss

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
        loss, metrics = loss_fn(outputs, token_rows(data.select_idxs(part), torch.device("cpu")))
        loss.backward(retain_graph=True)
        total += loss.item()
        found.append(metrics)
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
    loss_fn = make_preference_loss("train", "sigmoid", {"beta": 0.5})
    bound = lambda outputs, tokens: loss_fn(outputs, tokens, denominators(data))  # noqa: E731
    _, _, metrics = evaluate(bound, data, flat, [[0, 1], [2, 3, 4, 5]])
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
    data.set("ref_response_log_prob", torch.tensor(sums, dtype=torch.float64))
    data.set("kl", torch.zeros(8, dtype=torch.float64))
    loss_fn = make_preference_loss("train", mode, {})
    loss, _, metrics = evaluate(lambda *given: loss_fn(*given, denominators(data)), data, log_probs, [[0, 1, 2, 3], [4, 5, 6, 7]])
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
