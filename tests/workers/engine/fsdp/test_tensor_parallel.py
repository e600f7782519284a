"""Ranks that share every layer, against plain PyTorch (helpers/conformance.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.conformance import (
    COLUMN_ATOL,
    GRAD_NORM_RTOL,
    METRIC_ATOL,
    STEPS,
    TWO_MICRO_BATCHES,
    assert_weights_close,
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
from torch.distributed.tensor import DTensor

from lockstep.errors import ConfigError
from lockstep.models.load import Head
from lockstep.observability.metrics import merge_metrics, values
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.packing import Budget

TP2 = {"tensor_parallel_size": 2}
ATOL = 5e-5
"""Weights after two or three updates of about 2e-3: sums over heads and columns are split, and AdamW turns a gradient that is 0 but for
rounding into a step of any size (seen: single entries off by up to 8e-5 at one place, else 7e-6)."""
CASES = {
    "llama": ("llama", Head.LANGUAGE_MODEL, 2, {"recompute": "full"}, {}),
    "qwen3 tied": ("qwen3", Head.LANGUAGE_MODEL, 2, {"recompute": "selective"}, {"tie_word_embeddings": True}),
    "qwen2 value, 2 x 2": ("qwen2", Head.VALUE, 4, {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_updates_equal_plain_pytorch(tmp_path: Path, case: str) -> None:
    model_type, head, world, options, changes = CASES[case]
    path = save_tiny_model(tmp_path, model_type, value_head=head is Head.VALUE, **changes)
    start = reference_model(path, head)
    expected_columns = [reference_columns(start, head, row) for row in STEPS[0]]
    model, expected = reference_run(path, head, STEPS)

    options = {**options, "section": TP2}
    ranks = run_distributed(engine_run, world, path, "fsdp2", head, STEPS, TWO_MICRO_BATCHES, options)

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
    for _, _, weights in ranks:
        assert_weights_close(weights, model, atol=ATOL)


def test_a_checkpoint_of_a_tensor_group_continues_on_shards_and_on_one_rank_and_back(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    steps = [*STEPS, make_rows(6, seed=3)]
    model, _ = reference_run(path, Head.LANGUAGE_MODEL, steps)

    def step(update: int, section: dict[str, int]) -> dict[str, Tensor]:
        engine = make_tiny_engine(path, section=section)
        if update:
            engine.load(tmp_path / str(update))
        engine_step(engine, steps[update], update, TWO_MICRO_BATCHES)
        if update < 2:
            engine.save(tmp_path / str(update + 1))
        return weights_of(engine)

    run_distributed(step, 2, 0, TP2)
    run_distributed(step, 2, 1, {})
    for world, section in ((1, {}), (2, TP2)):
        for weights in run_distributed(step, world, 2, section):
            assert_weights_close(weights, model, atol=ATOL)


def test_a_rank_holds_its_part_of_every_layer_and_scores_as_one_does(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, score_head=True)
    sequences = [torch.cat([row["prompts"], row["responses"]]) for row in make_rows(5)]

    def score() -> tuple[Tensor, float]:
        engine = make_tiny_engine(path, "fsdp2", Head.SCORE, optim=None, pad_token_id=0, section=TP2)
        assert not any(parameter.requires_grad for parameter in engine.module.parameters())
        parameters = [p for p in engine.module.parameters() if isinstance(p, DTensor)]
        share = sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)
        mine = sequences[:1] if engine.rank == 0 else sequences[1:]
        return engine.score(Ragged.from_rows(mine), Budget(20), pad_token_id=0), share

    ranks = run_distributed(score, 2)
    model = reference_model(path, Head.SCORE)
    with torch.no_grad():
        expected = torch.stack([model(input_ids=ids[None]).logits[0, 0] for ids in sequences])
    torch.testing.assert_close(torch.cat([scores for scores, _ in ranks]), expected, atol=COLUMN_ATOL, rtol=0)
    assert all(share < 0.52 for _, share in ranks)  # all but the norms and the head


def test_heads_that_cannot_be_divided_are_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, num_key_value_heads=1)
    monkeypatch.setattr("lockstep.workers.engine.order.load_on_meta", None)

    def make() -> None:
        with pytest.raises(ConfigError, match=r"fsdp_config.tensor_parallel_size=2 cannot split the model's 1 key-value heads"):
            make_tiny_engine(path, section=TP2)

    run_distributed(make, 2)
