import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from lockstep.errors import DataError
from lockstep.utils.weight_files import check_weight_files

WHOLE = save({"a": torch.ones(3, 5), "b": torch.zeros(2, dtype=torch.bfloat16)}, metadata={"format": "pt"})


def test_whole_files_and_folders_without_any_pass(tmp_path):
    check_weight_files(tmp_path)
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_file({}, tmp_path / "empty.safetensors")
    check_weight_files(tmp_path)


@settings(max_examples=50, deadline=None)
@given(length=st.integers(0, len(WHOLE) - 1))
def test_whatever_is_cut_off_is_noticed(tmp_path_factory, length):
    folder = tmp_path_factory.mktemp("cut")
    (folder / "model.safetensors").write_bytes(WHOLE[:length])
    with pytest.raises(DataError, match=rf"model\.safetensors is .* it has {length:,} bytes.*copy or download it again"):
        check_weight_files(folder)


def test_a_file_that_the_index_names_must_be_there(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    (tmp_path / "one.safetensors").write_bytes(WHOLE)
    with pytest.raises(DataError, match=r"lacks 1 of 2 files of weights, first two\.safetensors"):
        check_weight_files(tmp_path)
    index.write_text("{}")
    with pytest.raises(DataError, match=r"index\.json cannot be read as an index"):
        check_weight_files(tmp_path)
