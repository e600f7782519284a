"""Supervised updates held against plain PyTorch, for every engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from helpers.conformance import (
    NUMBER_TOL,
    STEPS,
    TWO_MICRO_BATCHES,
    assert_weights_close,
    batch_of,
    denominators_of,
    reference_model,
    share,
    step_noise,
    weights_of,
)
from helpers.engine_properties import LM, Layout, Rows
from helpers.engines import TOTAL_UPDATES
from lockstep.config.engine import OptimConfig
from lockstep.models.packing import Budget
from lockstep.observability.metrics import merge_metrics, values
from lockstep.workers.losses import make_sft_loss


def reference_sft(path: str) -> tuple[Any, list[dict[str, float]]]:
    """transformers' model one row at a time, torch's cross entropy, clipping and AdamW; metrics and gradient norm of each update."""
    model = reference_model(path, LM)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    model.step_noise = dict.fromkeys(dict(model.named_parameters()), torch.zeros(()))
    found = []
    for update, rows in enumerate(STEPS):
        measured = reference_metrics(model, rows)
        loss = measured.pop("loss")
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        for group in optimizer.param_groups:
            group["lr"] = (
                1e-3 if update == 0 else 1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (update - 1) / (TOTAL_UPDATES - 2))))
            )
        model.step_noise = {name: model.step_noise[name] + noise for name, noise in step_noise(model, update).items()}
        optimizer.step()
        optimizer.zero_grad()
        found.append({**measured, "grad_norm": norm})
    return model, found


def reference_metrics(model: Any, rows: Rows) -> dict[str, Any]:
    nll, hits, entropy, tokens = torch.zeros(()), 0, 0.0, 0
    for row in rows:
        ids, start, mask = torch.cat([row["prompts"], row["responses"]]), len(row["prompts"]), row["response_mask"].bool()
        logits = model(input_ids=ids[None]).logits[0, start - 1 : len(ids) - 1][mask]
        targets = row["responses"][mask]
        nll = nll + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        hits += int((logits.argmax(-1) == targets).sum())
        entropy += float(torch.special.entr(logits.detach().softmax(-1)).sum())
        tokens += len(targets)
    counts = {"nll": float(nll.detach()), "token_accuracy": hits, "entropy": entropy}
    return {"loss": nll / tokens} | {f"train/{name}": count / tokens for name, count in counts.items()}


def assert_sft_equals_plain_pytorch(layout: Layout, path: str, budget: Budget = TWO_MICRO_BATCHES) -> None:
    """Metrics, gradient norms and weights of two updates, and what `evaluate` says of the model after them."""
    model, expected = reference_sft(path)

    def updates() -> Any:
        engine, found = layout.engine(path), []
        for update, rows in enumerate([*STEPS, STEPS[0]]):
            mine = batch_of(share(rows, update, engine.rank, engine.world_size))
            loss = make_sft_loss("train").of(denominators_of(rows))
            if update == len(STEPS):
                found.append((engine.evaluate(mine, loss, budget), {}))
            else:
                metrics = engine.forward_backward(mine, loss, budget)
                found.append((metrics, {"grad_norm": engine.optim_step().grad_norm}))
        return found, weights_of(engine)

    ranks = layout.run(updates)
    with torch.no_grad():
        after = reference_metrics(model, STEPS[0])
    after.pop("loss")
    for update, want in enumerate([*expected, after]):
        got = values(merge_metrics([found[update][0] for found, _ in ranks])) | ranks[0][0][update][1]
        assert got == pytest.approx(want, abs=NUMBER_TOL, rel=NUMBER_TOL), update
    for _, weights in ranks:
        assert_weights_close(weights, model)


def sft_numbers(layout: Layout, path: str, rows: Rows, cuts: Sequence[tuple[int, Budget]]) -> list[tuple[float, float]]:
    """Loss and gradient norm of the rows for each cut: how many of the rows are the first rank's, and what a micro-batch holds."""

    def measure() -> Any:
        engine, found = layout.engine(path, optim=OptimConfig(lr=0.0)), []
        for first, budget in cuts:
            mine = batch_of(rows[first:] if engine.rank else rows[:first])
            loss = make_sft_loss("train").of(denominators_of(rows))
            found.append((engine.forward_backward(mine, loss, budget), engine.optim_step().grad_norm))
        return found

    ranks = layout.run(measure)
    losses = [values(merge_metrics([metrics for metrics, _ in parts]))["train/nll"] for parts in zip(*ranks, strict=True)]
    return [(loss, norm) for loss, (_, norm) in zip(losses, ranks[0], strict=True)]
