"""Conversion between Hugging Face's parameters and megatron's."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.backends.megatron.convert import (
    Columns,
    GateUp,
    Piece,
    QueryKeyValue,
    Vocabulary,
    Whole,
    padded_vocabulary,
    place_parameters,
)


def rows_of(tensors: dict[str, Tensor]):
    return lambda name, start, stop: tensors[name][start:stop]


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["whole", "vocabulary", "columns", "gate up", "qkv", "qkv bias"]),
    ranks=st.sampled_from([1, 2, 4]), groups=st.integers(1, 2), queries=st.integers(1, 3), size=st.integers(1, 3),
    vocabulary=st.integers(1, 11),
)  # fmt: skip
def test_the_parts_of_all_ranks_join_to_what_they_were_taken_from(
    kind: str, ranks: int, groups: int, queries: int, size: int, vocabulary: int
) -> None:
    groups *= ranks
    heads = groups * queries
    tail = () if kind == "qkv bias" else (ranks * 3,)
    rows = {
        "whole": (5,), "vocabulary": (vocabulary,), "columns": (5,), "gate up": (ranks * size,) * 2,
        "qkv": (heads * size, groups * size, groups * size), "qkv bias": (heads * size, groups * size, groups * size),
    }[kind]  # fmt: skip
    tensors = {f"p{i}": torch.randn(count, *tail) for i, count in enumerate(rows)}
    names = tuple(tensors)
    kinds: dict[str, type[Piece]] = {"whole": Whole, "vocabulary": Vocabulary, "columns": Columns, "gate up": GateUp}
    piece = kinds[kind](names, rows) if kind in kinds else QueryKeyValue(names, rows, size)
    parts = [piece.take(rows_of(tensors), rank, ranks) for rank in range(ranks)]
    assert len({part.shape for part in parts}) == 1
    for name, joined in zip(names, piece.join(parts), strict=True):
        assert torch.equal(joined, tensors[name])


def test_a_group_has_its_queries_then_its_key_then_its_value() -> None:
    """Two groups of two heads of size 1 on two ranks; a row is its number."""
    tensors = {"q": torch.tensor([0.0, 1, 2, 3]), "k": torch.tensor([10.0, 11]), "v": torch.tensor([20.0, 21])}
    piece = QueryKeyValue(("q", "k", "v"), (4, 2, 2), 1)
    assert piece.take(rows_of(tensors), 0, 2).tolist() == [0, 1, 10, 20]
    assert piece.take(rows_of(tensors), 1, 2).tolist() == [2, 3, 11, 21]


def test_a_vocabulary_is_padded_with_zeros_to_what_the_ranks_divide() -> None:
    assert [padded_vocabulary(size, 4) for size in (4, 5, 8, 9)] == [4, 8, 8, 12]
    piece = Vocabulary(("e",), (5,))
    last = piece.take(rows_of({"e": torch.ones(5, 2)}), 3, 4)
    assert torch.equal(last, torch.zeros(2, 2))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"value_head": True}),
        ("llama", {"score_head": True}),
    ],
)
def test_every_parameter_has_one_place(family: str, options: dict[str, bool], stages: int) -> None:
    model = tiny_model(family, **options)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    placed = place_parameters(shapes, layers=2, head_size=8, stages=stages)
    names = [name for entry in placed if not entry.is_copy for name in entry.piece.names]
    assert sorted(names) == sorted(shapes)
    assert len({(entry.stage, entry.parameter) for entry in placed}) == len(placed)
    copies = [entry for entry in placed if entry.is_copy]
    assert [(entry.stage, entry.piece.names) for entry in copies] == (
        [(1, ("model.embed_tokens.weight",))] if options.get("tie_word_embeddings") and stages == 2 else []
    )
