"""The shares of a checkpoint that ranks write."""

import pytest
import torch

from lockstep.errors import DataError
from lockstep.models.weight_files import WeightFiles, write_weights
from lockstep.workers.engine.checkpoint import PROGRESS, Place, Progress, read_progress, write_index, write_progress, write_shares


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_rank_takes_part_in_the_gather_of_every_tensor_also_one_that_writes_nothing(tmp_path, world_size):
    """A rank that left it would leave the others in a collective for ever."""
    weights = {f"layer.{i}": torch.full((i + 1, 2), float(i)) for i in range(3)}
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    for rank in range(world_size):
        gathered = []
        tensors = ((gathered.append(name), (name, weights[name]))[1] for name in weights)
        write_shares(tmp_path / "model.safetensors", specs, tensors, Place(rank, world_size), write_weights)
        assert gathered == list(weights)
    write_index(tmp_path / "model.safetensors", specs, world_size)
    assert len(list(tmp_path.glob("*.safetensors"))) == min(world_size, len(weights))
    assert WeightFiles(tmp_path).shapes == {name: shape for name, (_, shape) in specs.items()}


SPECS = {"a": (torch.float32, (1,))}


def test_progress_is_read_back(tmp_path):
    write_progress(tmp_path, Progress(3, {"a": 2}))
    assert read_progress(tmp_path, SPECS) == Progress(3, {"a": 2})


@pytest.mark.parametrize(
    "text",
    [
        '{"updates": -1, "steps": {"a": 1}}',
        '{"updates": 1, "steps": {"a": -2}}',
        '{"updates": 1e400, "steps": {"a": 1}}',
        "[" * 100_000,
        "[]",
        "{}",
    ],
)
def test_malformed_progress_is_an_error_that_names_the_file(tmp_path, text):
    (tmp_path / PROGRESS).write_text(text)
    with pytest.raises(DataError, match=PROGRESS):
        read_progress(tmp_path, SPECS)
