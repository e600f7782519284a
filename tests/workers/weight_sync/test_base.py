"""Checksums, and what is done with them."""

import pytest
import torch
from helpers.tiny import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import WeightSyncError
from lockstep.workers.weight_sync import base
from lockstep.workers.weight_sync.base import Verified, check_equal, checksum, copy_weights, describe

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def plain_checksum(data: bytes) -> int:
    """The formula with Python's integers."""
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**64


@given(st.binary(max_size=200), st.integers(0, 9))
def test_a_checksum_is_the_weighted_sum_of_the_words_wherever_the_memory_begins(data: bytes, offset: int) -> None:
    memory = torch.tensor(list(bytes(offset) + data), dtype=torch.uint8)
    assert checksum(memory[offset:]) == plain_checksum(data)


def test_a_checksum_in_chunks_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = checksum(tensor)
    monkeypatch.setattr(base, "_CHUNK", 7)
    assert checksum(tensor) == whole == plain_checksum(tensor.numpy().tobytes())


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_changed_byte_and_exchanged_words_change_the_checksum(data: bytes, draw: st.DataObject) -> None:
    values = torch.tensor(list(data), dtype=torch.uint8)
    changed = values.clone()
    changed[draw.draw(st.integers(0, len(data) - 1))] += draw.draw(st.integers(1, 255))
    assert checksum(changed) != checksum(values)
    words = torch.tensor(list(range(1, 1 + len(data))))
    assert checksum(words.flip(0)) != checksum(words) or len(words) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_does_not_depend_on_strides(dtype: torch.dtype) -> None:
    tensor = torch.arange(35).reshape(5, 7).to(dtype)
    assert describe(tensor.t().contiguous()) == describe(tensor.t())
    assert describe(tensor.t()) != describe(tensor)


def weights() -> dict[str, Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("a"), "1 of 2 tensors did not arrive, first a"),
        (lambda tensors: tensors.update(c=torch.zeros(1)), "1 tensors arrived that were not sent, first c"),
        (lambda tensors: tensors.update(a=tensors["a"].reshape(3, 2)), r"a is not what was sent: float32\[2, 3\]"),
        (lambda tensors: tensors.update(b=tensors["b"].float()), "b is not what was sent"),
        (lambda tensors: tensors.update(b=tensors["b"] + 1), "b is not what was sent"),
    ],
)
def test_manifests_that_differ_are_refused_with_the_first_tensor(change, message: str) -> None:
    sent = {name: describe(tensor) for name, tensor in weights().items()}
    check_equal(sent, dict(sent))
    tensors = weights()
    change(tensors)
    with pytest.raises(WeightSyncError, match=message):
        check_equal(sent, {name: describe(tensor) for name, tensor in tensors.items()})


@pytest.mark.parametrize("known_before", [True, False], ids=["manifest", "stream"])
def test_tensors_are_verified_as_they_are_read_and_all_of_them_first_where_that_is_possible(known_before: bool) -> None:
    sent = {name: describe(tensor) for name, tensor in weights().items()}
    stream = [(name, sent[name], tensor) for name, tensor in weights().items()]
    stream[1][2][0] = 7
    seen = []
    with pytest.raises(WeightSyncError, match="b is not what was sent"):
        for name, _ in Verified(stream, sent if known_before else None):
            seen.append(name)
    assert seen == ([] if known_before else ["a"])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_copied_weights_make_the_same_model(tied: bool) -> None:
    source, target = tiny_model(seed=1, tie_word_embeddings=tied), tiny_model(seed=2, tie_word_embeddings=tied)
    with torch.no_grad():
        copy_weights(target, source.named_parameters())
    ids = torch.arange(2, 9)[None]
    assert torch.equal(target(ids).logits, source(ids).logits)
    assert (target.lm_head.weight is target.model.embed_tokens.weight) is tied


def test_a_copy_that_leaves_a_parameter_out_is_refused() -> None:
    model = tiny_model()
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters() if name != "model.norm.weight"]
    with pytest.raises(WeightSyncError, match=r"left 1 parameters out, first \['model.norm.weight'\]"):
        copy_weights(model, weights)
