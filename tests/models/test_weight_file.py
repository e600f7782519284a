"""Safetensors files written one tensor at a time, read by the library."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lockstep.models.weight_file import write_weights

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
