"""Groups of ranks that hold a copy each, and weights that are written and read by parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.conformance import (
    GRAD_NORM_RTOL,
    STEPS,
    TWO_MICRO_BATCHES,
    assert_weights_close,
    engine_run,
    engine_step,
    reference_run,
    weights_of,
)
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.tiny import save_tiny_model
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from lockstep.models.load import Head
from lockstep.workers.engine.fsdp import sharding


def test_two_copies_of_two_shards_learn_as_one_and_continue_on_one_rank(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    model, _ = reference_run(path, Head.LANGUAGE_MODEL, STEPS)

    def first_step() -> None:
        engine = make_tiny_engine(path, "fsdp", section={"fsdp_size": 2})
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)
        engine.save(tmp_path / "saved")

    def second_step(**section: int) -> dict[str, Tensor]:
        engine = make_tiny_engine(path, "fsdp", section=section)
        engine.load(tmp_path / "saved")
        engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
        return weights_of(engine)

    run_distributed(first_step, 4)
    for weights in (*run_distributed(second_step, 1), *run_distributed(lambda: second_step(fsdp_size=2), 4)):
        assert_weights_close(weights, model)


def test_hybrid_shards_may_keep_gathered_layers(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    model, expected = reference_run(path, Head.LANGUAGE_MODEL, STEPS)
    options = {"section": {"fsdp_size": 2, "reshard_after_forward": False}}
    for _, results, weights in run_distributed(engine_run, 4, path, "fsdp", Head.LANGUAGE_MODEL, STEPS, TWO_MICRO_BATCHES, options):
        assert_weights_close(weights, model)
        assert [r["grad_norm"] for _, r in results] == pytest.approx([e["grad_norm"] for e in expected], rel=GRAD_NORM_RTOL)


def test_fsdp1_gathers_one_layer_at_a_time(tmp_path: Path) -> None:
    """While a weight is handed out, no other layer than its own is whole."""
    path = save_tiny_model(tmp_path)

    def watch() -> int:
        engine = make_tiny_engine(path, "fsdp")
        units = [unit for unit in engine.module.modules() if isinstance(unit, FullyShardedDataParallel)]
        largest = 0
        for _name, tensor in sharding.whole_tensors(engine.module):
            assert torch.isfinite(tensor).all()
            whole = [
                unit for unit in units if unit._handle is not None and unit._handle.is_sharded(unit._handle.flat_param) is False
            ]
            largest = max(largest, len(whole))
        assert len(units) == 3
        return largest

    assert run_distributed(watch, 2) == [1, 1]
