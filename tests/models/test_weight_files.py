"""Safetensors files written one tensor at a time, read by the library."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from helpers.tiny import save_tiny_model, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from lockstep.errors import DataError
from lockstep.models.weight_files import check_weight_files, count_parameters, write_weights

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


TENSORS = {
    "a.weight": torch.randn(3, 5),
    "b": torch.randn(4, 2).t(),  # not contiguous
    "half": torch.randn(7).bfloat16(),
    "count": torch.tensor(3),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
}
SPECS = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def test_the_library_reads_what_was_written_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, SPECS, reversed(TENSORS.items()))
    found = load_file(file)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_tensor_is_not_kept_once_the_next_is_written(tmp_path: Path) -> None:
    specs = {str(number): (torch.float32, (4,)) for number in range(3)}
    seen: list[weakref.ref[torch.Tensor]] = []

    def tensors():
        for name in specs:
            tensor = torch.zeros(4)
            seen.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    def check():
        for number, pair in enumerate(tensors()):
            assert all(reference() is None for reference in seen[: max(0, number - 1)])
            yield pair

    write_weights(tmp_path / "model.safetensors", specs, check())
    assert len(seen) == 3


def test_the_memory_of_a_written_tensor_can_still_be_resized(tmp_path: Path) -> None:
    """Weights that rest in host memory need it; a numpy view would forbid it for good."""
    tensor = torch.zeros(4)
    write_weights(tmp_path / "model.safetensors", {"a": (torch.float32, (4,))}, [("a", tensor)])
    assert tensor.untyped_storage().resizable()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([("a.weight", TENSORS["a.weight"])], "2 tensors .* never came"),
        ([("other", torch.zeros(1))], "other was not expected"),
        ([("b", TENSORS["b"]), ("b", TENSORS["b"])], "comes twice"),
        ([("b", torch.zeros(4, 2))], r"not torch.float32 of \(2, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, given: list, words: str) -> None:
    specs = {name: SPECS[name] for name in ("a.weight", "b", "half")}
    with pytest.raises(ValueError, match=words):
        write_weights(tmp_path / "model.safetensors", specs, given)
