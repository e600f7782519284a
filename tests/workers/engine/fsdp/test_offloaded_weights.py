"""Engines whose weights rest in host memory. On a CPU that is memory of the same kind, and the moves are the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.conformance import STEPS, TWO_MICRO_BATCHES, assert_weights_close, batch_of, engine_step, reference_run, weights_of
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.tiny import save_tiny_model
from torch import Tensor, nn

from lockstep.models.attention import CACHED
from lockstep.models.load import Head
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.engine.fsdp import sharding
from lockstep.workers.weight_sync.source import SharedWeights

OFFLOAD = {"param_offload": True, "optimizer_offload": True}


def resident(engine: TrainEngine) -> int:
    """Bytes of weights and gradients that are on the device."""
    tensors = [*sharding.shards(engine.module), *sharding.gradient_shards(engine.module)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize(
    ("strategy", "world", "section"),
    [("fsdp", 1, {}), ("fsdp", 2, {}), ("fsdp2", 1, {}), ("fsdp2", 2, {"reshard_after_forward": False})],
)
def test_an_idle_engine_holds_nothing_on_the_device_and_learns_as_ever(
    tmp_path: Path, strategy: str, world: int, section: dict[str, bool]
) -> None:
    path = save_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    model, _ = reference_run(path, Head.LANGUAGE_MODEL, STEPS)

    def train() -> dict[str, Tensor]:
        engine = make_tiny_engine(path, strategy, section=OFFLOAD | section)
        assert resident(engine) == 0
        engine_step(engine, STEPS[0], 0, TWO_MICRO_BATCHES)  # two calls: between them the gradients rest too
        assert resident(engine) == 0
        engine.save(tmp_path / "saved")
        engine.load(tmp_path / "saved")
        with engine.on_device():
            assert resident(engine) > 0
            engine_step(engine, STEPS[1], 1, TWO_MICRO_BATCHES)
            assert resident(engine) > 0
        engine.forward(batch_of(STEPS[0][:2]), TWO_MICRO_BATCHES)
        assert resident(engine) == 0
        return weights_of(engine)

    for weights in run_distributed(train, world):
        assert_weights_close(weights, model)


def test_a_decoder_has_weights_while_the_engine_is_offloaded(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def use() -> None:
        engine = make_tiny_engine(path, section=OFFLOAD, decoder_attention=CACHED)
        shared = SharedWeights(engine, torch.float32)
        decoder = engine.decoder
        assert isinstance(decoder, nn.Module)
        expected = weights_of(engine)
        with shared.borrowed() as copied:
            assert resident(engine) == 0
            assert copied == sum(tensor.nbytes for tensor in expected.values())
            assert all(torch.equal(parameter, expected[name]) for name, parameter in decoder.named_parameters())

    run_distributed(use, 1)


def test_a_frozen_engine_is_offloaded_between_stages(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def use() -> tuple[Tensor, Tensor]:
        engine, plain = make_tiny_engine(path, optim=None, section=OFFLOAD), make_tiny_engine(path, optim=None)
        rows = batch_of(STEPS[0])
        for _ in range(2):
            columns = engine.forward(rows, TWO_MICRO_BATCHES)
            assert resident(engine) == 0
        return columns.ragged("log_probs").values, plain.forward(rows, TWO_MICRO_BATCHES).ragged("log_probs").values

    ((rested, wanted),) = run_distributed(use, 1)
    assert torch.equal(rested, wanted)
