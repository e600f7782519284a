import pytest
import torch
from helpers.tiny import save_tiny_model, tiny_model
from safetensors.torch import save_file

from lockstep.utils.model_size import count_parameters


@pytest.mark.parametrize("tied", [True, False])
def test_the_count_is_that_of_the_model(tmp_path, tied):
    model = tiny_model(tie_word_embeddings=tied)
    assert count_parameters(save_tiny_model(tmp_path, tie_word_embeddings=tied)) == sum(p.numel() for p in model.parameters())


def test_several_files_add_up_and_scalars_count(tmp_path):
    save_file({"a": torch.zeros(2, 3), "scalar": torch.tensor(1.0)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    assert count_parameters(str(tmp_path)) == 12


def test_there_is_no_count_without_files_to_read(tmp_path):
    assert count_parameters(str(tmp_path)) is None
    assert count_parameters("someone/some-model") is None
