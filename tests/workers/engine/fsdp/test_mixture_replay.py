"""Routers that choose what a sampler chose: log-probs and updates against plain transformers with the same choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance import COLUMN_ATOL, NUMBER_TOL, TEMPERATURE, batch_of, make_rows, reference_columns, reference_model, share
from helpers.engine_properties import LM, VALUE, Layout
from helpers.mixtures import MIXTURES, chosen_experts, draw_experts, forced
from helpers.tiny import save_tiny_model
from torch import Tensor

from lockstep.models.chunked_head import LossOutput
from lockstep.models.packing import Budget
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.base import TokenOutputs, TokenRows

Rows = list[dict[str, Tensor]]


def rows_with_experts() -> Rows:
    """Rows of which three share a prompt of 40 tokens, and one has no response; experts at random."""
    rows = make_rows(5)
    prompt = torch.arange(40) % 30 + 2
    rows += [row | {"prompts": prompt} for row in make_rows(5, seed=1) if len(row["responses"])][:3]
    shared = draw_experts(40, 99)
    for number, row in enumerate(rows):
        row["experts"] = draw_experts(len(row["prompts"]) + len(row["responses"]), number)
        if len(row["prompts"]) == 40:  # computed once, by the sampler too
            row["experts"][:40] = shared
    return rows


def data_of(rows: Rows) -> DataProto:
    data = batch_of(rows)
    data.set("experts", Ragged.from_rows([row["experts"] for row in rows], dtype=torch.int16))
    return data


def minus_log_probs(outputs: TokenOutputs, tokens: TokenRows) -> LossOutput:
    assert outputs.log_probs is not None
    return LossOutput(-(outputs.log_probs * tokens.columns["advantages"]).sum(), {})


def reference(path: str, rows: Rows, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Log-probs of the rows one by one, and the norm of the gradient."""
    model, found, losses = reference_model(path, LM, dtype), [], []
    for row in rows:
        with forced(model, row["experts"]):
            log_probs = reference_columns(model, LM, row)["log_probs"]
        found.append(log_probs.detach())
        losses.append(-(log_probs * row["advantages"]).sum())
    torch.stack(losses).sum().backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return torch.cat(found), torch.stack(norms).norm().item()


@pytest.mark.parametrize(
    ("family", "layout", "recompute"),
    [
        ("mixtral", Layout("fsdp2", 1), "full"),
        ("qwen2_moe", Layout("fsdp2", 1), None),
        ("qwen3_moe", Layout("fsdp2", 2), "full"),
        ("olmoe", Layout("fsdp", 2), None),
        ("mixtral", Layout("fsdp2", 2, {"tensor_parallel_size": 2}), None),
    ],
)
def test_log_probs_and_gradient_are_plain_transformers_with_the_same_experts(
    tmp_path: Path, family: str, layout: Layout, recompute: str | None
) -> None:
    path = save_tiny_model(tmp_path, family, **MIXTURES[family])
    rows = rows_with_experts()
    wanted, norm = reference(path, rows, torch.float64)

    def update(budget: Budget) -> tuple[Tensor, dict[str, Any], float]:
        engine = layout.engine(path, recompute=recompute)
        mine = data_of(share(rows, 0, engine.rank, engine.world_size))
        columns = engine.forward(mine, budget, TEMPERATURE).ragged("log_probs").values
        metrics = engine.forward_backward(mine, minus_log_probs, budget, TEMPERATURE)
        return columns, metrics, engine.optim_step().grad_norm

    for budget in (Budget(60), Budget(10_000)):
        ranks = layout.run(update, budget)
        torch.testing.assert_close(torch.cat([c for c, _, _ in ranks]), wanted.float(), atol=COLUMN_ATOL, rtol=0)
        assert all(found == pytest.approx(norm, rel=NUMBER_TOL) for _, _, found in ranks)
        rerouted = values(merge_metrics([metrics for _, metrics, _ in ranks if metrics]))["moe/rerouted"]
        assert 0.5 < rerouted < 1.0  # of the six pairs of experts one is the router's own


def test_a_rank_whose_experts_no_token_goes_to_computes_with_the_others(tmp_path: Path) -> None:
    """Ranks divide the experts, and every token goes to those of the first."""
    layout = Layout("fsdp2", 2, {"tensor_parallel_size": 2})
    path, rows = save_tiny_model(tmp_path, "olmoe", **MIXTURES["olmoe"]), rows_with_experts()
    for row in rows:
        row["experts"] = torch.tensor([[0, 1, 1, 0]], dtype=torch.int16).repeat(len(row["experts"]), 1)
    wanted, norm = reference(path, rows, torch.float64)

    def update() -> tuple[Tensor, float]:
        engine = layout.engine(path)
        mine = data_of(share(rows, 0, engine.rank, engine.world_size))
        columns = engine.forward(mine, Budget(1000), TEMPERATURE).ragged("log_probs").values
        engine.forward_backward(mine, minus_log_probs, Budget(1000), TEMPERATURE)
        return columns, engine.optim_step().grad_norm

    ranks = layout.run(update)
    torch.testing.assert_close(torch.cat([columns for columns, _ in ranks]), wanted.float(), atol=COLUMN_ATOL, rtol=0)
    assert all(found == pytest.approx(norm, rel=NUMBER_TOL) for _, found in ranks)


def test_a_routers_own_choice_replayed_changes_no_bit(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "olmoe", **MIXTURES["olmoe"])
    model, rows = reference_model(path, LM), rows_with_experts()
    for row in rows:
        row["experts"] = chosen_experts(model, torch.cat([row["prompts"], row["responses"]]))

    def update(data: DataProto) -> tuple[Tensor, dict[str, float], float]:
        engine = Layout().engine(path)
        columns = engine.forward(data, Budget(100)).ragged("log_probs").values
        metrics = values(engine.forward_backward(data, minus_log_probs, Budget(100)))
        return columns, metrics, engine.optim_step().grad_norm

    (kept, metrics, norm), (own, without, own_norm) = (Layout().run(update, data)[0] for data in (data_of(rows), batch_of(rows)))
    assert torch.equal(kept, own)
    assert norm == own_norm
    assert metrics.pop("moe/rerouted") == 0.0
    assert metrics == without


def test_critics_references_and_adapters_that_are_off_choose_for_themselves(tmp_path: Path) -> None:
    path, rows = save_tiny_model(tmp_path, "qwen3_moe", **MIXTURES["qwen3_moe"]), rows_with_experts()

    def differs(head: Any, adapts: bool, **options: Any) -> bool:
        engine = Layout().engine(path, head, model={"lora_rank": 2, "target_modules": ["q_proj"]} if adapts else {}, **options)
        name = "values" if head is VALUE else "log_probs"

        def found(data: DataProto) -> Tensor:
            if not adapts:
                return engine.forward(data, Budget(100)).ragged(name).values
            with engine.adapter_off():
                return engine.forward(data, Budget(100)).ragged(name).values

        return not torch.equal(found(data_of(rows)), found(batch_of(rows)))

    def cases() -> list[bool]:
        return [differs(LM, False), differs(VALUE, False), differs(LM, False, optim=None), differs(LM, True)]

    assert Layout().run(cases) == [[True, False, False, False]]


def test_experts_that_do_not_fit_the_model_are_said(tmp_path: Path) -> None:
    path, rows = save_tiny_model(tmp_path, "olmoe", **MIXTURES["olmoe"]), rows_with_experts()
    rows[0]["experts"] = rows[0]["experts"][1:]

    def forward() -> None:
        Layout().engine(path).forward(data_of(rows), Budget(100))

    with pytest.raises(Exception, match="the column experts does not fit 2 routers"):
        Layout().run(forward)
