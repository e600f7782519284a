"""Preference pairs, and plain PyTorch to hold the engines against: dense logits of one row at a time, the loss of DPO written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.conformance import NUMBER_TOL, assert_weights_close, reference_model, step_noise, weights_of
from helpers.engine_properties import LM, Layout
from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.rows import Rows
from lockstep.models.packing import Budget
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base.dispatch import share_rows
from lockstep.workers.response_losses import make_preference_loss

BETA, NLL_COEF = 0.3, 0.2
WHOLE = Budget(10_000)


def make_pairs(count: int = 5, seed: int = 0) -> DataProto:
    """Pairs of different lengths, two rows each, some of whose response tokens are not trained."""
    draw = torch.Generator().manual_seed(seed)
    prompts, responses, masks = [], [], []
    for number in range(count):
        prompt = torch.randint(2, 32, (1 + (3 * number) % 5,), generator=draw)
        for row in range(2):
            length = 1 + (5 * number + 3 * row) % 7
            mask = torch.rand(length, generator=draw) > 0.2
            mask[-1] = True
            prompts.append(prompt)
            responses.append(torch.randint(2, 32, (length,), generator=draw))
            masks.append(mask.long())
    columns = {
        "prompts": Ragged.from_rows(prompts),
        "responses": Ragged.from_rows(responses),
        "response_mask": Ragged.from_rows(masks),
        "is_chosen": torch.tensor([True, False] * count),
        "unit": torch.arange(count).repeat_interleave(2),
        "ref_response_log_prob": -4.0
        * torch.rand(2 * count, generator=draw, dtype=torch.float64)
        * torch.tensor([len(m) for m in masks]),
    }
    return DataProto.from_dict(columns, {"index": list(range(2 * count))})


def denominators(data: DataProto) -> Denominators:
    mask = data.ragged("response_mask")
    return Denominators.of(mask.values, Rows(mask.lengths))


def row_log_prob(model: Any, data: DataProto, row: int) -> Tensor:
    """The log-probs of the trained tokens of a row, from all logits."""
    item = data[row].batch
    logits = model(input_ids=item["input_ids"][None]).logits[0, len(item["prompts"]) - 1 : -1]
    log_probs = torch.log_softmax(logits, -1)[torch.arange(len(item["responses"])), item["responses"]]
    return log_probs[item["response_mask"].bool()]


def reference_loss(model: Any, data: DataProto) -> Tensor:
    """-log sigmoid(beta D) + coefficient * nll of the chosen, averaged over pairs."""
    total = torch.zeros(())
    reference = data.columns["ref_response_log_prob"]
    for row in range(0, len(data), 2):
        chosen, rejected = row_log_prob(model, data, row), row_log_prob(model, data, row + 1)
        gap = (chosen.sum() - reference[row]) - (rejected.sum() - reference[row + 1])
        total = total - torch.nn.functional.logsigmoid(BETA * gap) - NLL_COEF * chosen.mean()
    return total / (len(data) // 2)


def preference_loss(data: DataProto, mode: str = "sigmoid") -> Any:
    """The loss that `reference_loss` is."""
    return make_preference_loss("train", mode, {"beta": BETA}, NLL_COEF).of(denominators(data))


def assert_pairs_learn_as_in_plain_pytorch(layout: Layout, path: str, budgets: tuple[Budget, ...] = (WHOLE, Budget(40))) -> None:
    """Loss, gradient norm and weights after one update of DPO with an nll term, whatever the cut."""
    data = make_pairs()
    model = reference_model(path, LM)
    loss = reference_loss(model, data)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    model.step_noise = step_noise(model, 0)
    optimizer.step()

    def update(budget: Budget) -> tuple[Any, float, dict[str, Tensor]]:
        engine = layout.engine(path)
        mine = data.select_idxs(share_rows(data, engine.world_size)[engine.rank])
        metrics = engine.forward_backward(mine, preference_loss(data), budget)
        return metrics, engine.optim_step().grad_norm, weights_of(engine)

    for budget in budgets:
        ranks = layout.run(update, budget)
        metrics = values(merge_metrics([metrics for metrics, _, _ in ranks]))
        assert abs(metrics["train/loss"] - loss.item()) < NUMBER_TOL
        for _, found, weights in ranks:
            assert abs(found - norm.item()) < NUMBER_TOL * norm.item()
            assert_weights_close(weights, model)
