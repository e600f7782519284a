"""A reward model's updates held against plain PyTorch, for every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.conformance import NUMBER_TOL, assert_weights_close, reference_model, step_noise, weights_of
from helpers.engine_properties import SCORE, Layout
from helpers.pairs import WHOLE, denominators, make_pairs
from lockstep.models.packing import Budget
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto
from lockstep.single_controller.base.dispatch import share_rows
from lockstep.workers.response_losses import make_reward_loss

COEFFICIENT = 0.1


def make_scored_pairs() -> DataProto:
    data = make_pairs()
    data.columns["margin"] = torch.tensor([0.0, 0.5, 1.0, 0.0, 0.2]).repeat_interleave(2)
    return data


def reference_scores(model: Any, data: DataProto) -> Tensor:
    """transformers' own score of each row, one at a time."""
    return torch.stack([model(input_ids=data[row].batch["input_ids"][None]).logits[0, 0] for row in range(len(data))])


def reference_loss(scores: Tensor, data: DataProto) -> Tensor:
    """The mean over pairs of -log(1 / (1 + exp(-(r+ - r- - m)))) + c (r+ + r-)^2."""
    chosen, rejected = scores[::2], scores[1::2]
    probability = 1 / (1 + torch.exp(-(chosen - rejected - data.columns["margin"][::2])))
    return (-torch.log(probability) + COEFFICIENT * (chosen + rejected) ** 2).mean()


def assert_scores_learn_as_in_plain_pytorch(
    layout: Layout, path: str, budgets: tuple[Budget, ...] = (WHOLE, Budget(40)), **options: Any
) -> None:
    """Loss, metrics, gradient norm and weights of an update, and what `evaluate` says before it, whatever the cut."""
    data = make_scored_pairs()
    model = reference_model(path, SCORE)
    scores = reference_scores(model, data)
    loss = reference_loss(scores, data)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    model.step_noise = step_noise(model, 0)
    optimizer.step()
    ahead = scores[::2] - scores[1::2]
    expected = {
        "train/loss": loss.item(),
        "train/accuracy": (ahead > 0).double().mean().item(),
        "train/margin": ahead.mean().item(),
        "train/chosen_score": scores[::2].mean().item(),
        "train/rejected_score": scores[1::2].mean().item(),
    }

    def update(budget: Budget) -> tuple[Any, Any, float, dict[str, Tensor]]:
        engine = layout.engine(path, SCORE, pad_token_id=0, **options)
        mine = data.select_idxs(share_rows(data, engine.world_size)[engine.rank])
        loss_fn = make_reward_loss("train", COEFFICIENT).of(denominators(data))
        seen = engine.evaluate(mine, loss_fn, budget)
        metrics = engine.forward_backward(mine, loss_fn, budget)
        return seen, metrics, engine.optim_step().grad_norm, weights_of(engine)

    for budget in budgets:
        ranks = layout.run(update, budget)
        for which in (0, 1):
            found = values(merge_metrics([rank[which] for rank in ranks]))
            assert {name: found[name] for name in expected} == pytest.approx(expected, abs=NUMBER_TOL)
        for *_, found_norm, weights in ranks:
            assert found_norm == pytest.approx(norm, rel=NUMBER_TOL)
            assert_weights_close(weights, model)
