import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.distributed import run_distributed
from helpers.engines import make_tiny_engine
from helpers.tiny import save_tiny_model, tiny_model
from torch import Tensor

from lockstep.models.attention import CACHED
from lockstep.models.chunked_head import LossOutput
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.base import TokenOutputs, TrainEngine
from lockstep.workers.weight_sync.base import check_equal, describe
from lockstep.workers.weight_sync.source import SharedWeights

STRATEGIES = ("fsdp", "fsdp2")
FP32_BYTES = 4


def update(engine: TrainEngine) -> None:
    """One optimizer step on anything."""

    def loss_fn(outputs: TokenOutputs, rows: DataProto) -> LossOutput:
        assert outputs.log_probs is not None
        return LossOutput(outputs.log_probs.sum(), {})

    rows = {"prompts": Ragged.from_rows([[3, 4]]), "responses": Ragged.from_rows([[5, 6, 7]])}
    engine.forward_backward(DataProto.from_dict(rows), loss_fn, Budget(100))
    engine.optim_step()


def borrowed_weights(shared: SharedWeights, engine: TrainEngine) -> tuple[int, dict[str, Tensor], dict[str, int]]:
    """Bytes copied, the decoder's parameters and their addresses while they are borrowed."""
    assert engine.decoder is not None
    with shared.borrowed() as copied:
        parameters = dict(engine.decoder.named_parameters())
        return copied, {n: p.detach().clone() for n, p in parameters.items()}, {n: p.data_ptr() for n, p in parameters.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_on_one_rank_the_decoder_has_the_engines_own_tensors(tmp_path: Path, strategy: str, tied: bool) -> None:
    """Nothing is copied, ever: not after a step, not after a checkpoint is loaded."""
    path = save_tiny_model(tmp_path / "model", tie_word_embeddings=tied)

    def use() -> None:
        engine = make_tiny_engine(path, strategy, decoder_attention=CACHED)
        shared = SharedWeights(engine, torch.float32)
        decoder = engine.decoder
        assert decoder is not None
        seen = []
        for change in (lambda: None, lambda: update(engine), lambda: engine.save(tmp_path / "saved"), lambda: update(engine)):
            change()
            copied, weights, addresses = borrowed_weights(shared, engine)
            own = dict(engine.export_weights())
            assert copied == 0
            assert addresses == {name: tensor.data_ptr() for name, tensor in own.items()}
            assert all(torch.equal(weights[name], own[name]) for name in own)
            check_equal({n: describe(t) for n, t in own.items()}, {n: describe(t) for n, t in weights.items()})
            seen.append(weights)
        name = "model.layers.1.mlp.up_proj.weight"
        assert not torch.equal(seen[0][name], seen[1][name])
        assert not torch.equal(seen[2][name], seen[3][name])
        engine.load(tmp_path / "saved")
        copied, weights, addresses = borrowed_weights(shared, engine)
        assert copied == 0
        assert addresses == {name: tensor.data_ptr() for name, tensor in engine.export_weights()}
        assert all(torch.equal(weights[name], seen[2][name]) for name in weights)
        with shared.borrowed():
            assert (decoder.lm_head.weight.data_ptr() == decoder.model.embed_tokens.weight.data_ptr()) is tied

    run_distributed(use, 1)


def test_nothing_is_kept_of_weights_that_came_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path)

    def use() -> None:
        engine = make_tiny_engine(path, "fsdp", decoder_attention=CACHED)
        shared = SharedWeights(engine, torch.bfloat16)
        weights = engine.decoder_weights

        def breaks_off() -> Iterator[tuple[str, Tensor]]:
            yield from itertools.islice(weights(), 3)
            raise MemoryError

        monkeypatch.setattr(engine, "decoder_weights", breaks_off)
        with pytest.raises(MemoryError), shared.borrowed():
            pass
        assert engine.decoder is not None
        assert all(parameter.is_meta for parameter in engine.decoder.parameters())

    run_distributed(use, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_on_two_ranks_whole_tensors_are_gathered_and_given_back(tmp_path: Path, strategy: str, tied: bool) -> None:
    path = save_tiny_model(tmp_path, tie_word_embeddings=tied)
    expected = dict(tiny_model(tie_word_embeddings=tied).named_parameters())
    size = sum(parameter.numel() for parameter in expected.values()) * FP32_BYTES

    def use() -> dict[str, Tensor]:
        engine = make_tiny_engine(path, strategy, decoder_attention=CACHED)
        shared = SharedWeights(engine, torch.float32)
        decoder = engine.decoder
        assert decoder is not None
        assert all(parameter.is_meta for parameter in decoder.parameters())
        copied, before, _ = borrowed_weights(shared, engine)
        assert copied == size
        assert all(torch.equal(before[name], expected[name]) for name in expected)
        with shared.borrowed():
            assert (decoder.lm_head.weight.data_ptr() == decoder.model.embed_tokens.weight.data_ptr()) is tied
        assert all(parameter.is_meta for parameter in decoder.parameters())
        update(engine)
        _, after, _ = borrowed_weights(shared, engine)
        return after

    first, second = run_distributed(use, 2)
    assert set(first) == set(expected)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"], expected["model.norm.weight"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_lower_precision_is_a_copy_of_half_the_size(tmp_path: Path, strategy: str) -> None:
    path = save_tiny_model(tmp_path)
    expected = dict(tiny_model().named_parameters())

    def use() -> tuple[int, dict[str, Tensor]]:
        engine = make_tiny_engine(path, strategy, dtype="bfloat16", decoder_attention=CACHED)
        return borrowed_weights(SharedWeights(engine, torch.bfloat16), engine)[:2]

    ((copied, weights),) = run_distributed(use, 1)
    assert copied == sum(parameter.numel() for parameter in expected.values()) * 2
    assert all(torch.equal(weights[name], expected[name].bfloat16()) for name in expected)


def test_the_weights_are_given_back_when_generation_fails(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)

    def use() -> bool:
        engine = make_tiny_engine(path, decoder_attention=CACHED)
        shared = SharedWeights(engine, torch.float32)
        with pytest.raises(KeyError), shared.borrowed():
            raise KeyError
        assert engine.decoder is not None
        return all(parameter.is_meta for parameter in engine.decoder.parameters())

    assert run_distributed(use, 1) == [True]
