"""What a captured prefill computes, and which it takes. The decoder hands out what it was given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.fake_gpu import short_prefill
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

WIDTH = 6


class Mirror:
    """See Decoder: the numbers of each token and the pages of its row."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def hidden(self, tokens: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor, context_lens: Tensor) -> Tensor:
        assert context_lens.tolist() == positions.tolist()
        block = len(tokens) // len(page_table)
        self.sizes.append((len(tokens), block))
        own = page_table.repeat_interleave(block, 0)
        return torch.cat([torch.stack([tokens, positions, slots], dim=1), own], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9)), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_each_token_is_computed_with_its_numbers_and_its_rows_pages(rows: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    decoder = Mirror()
    prefill = short_prefill.ShortPrefill(decoder, WIDTH, 8, torch.device("cpu"))
    lengths = [length for length, _ in rows]
    packed = rng.integers(1, 1000, (3, sum(lengths)))
    pages = [rng.integers(1, 99, rng.integers(1, WIDTH + 1)).tolist() for _ in rows]
    for wanted in (np.cumsum(lengths) - 1, np.arange(sum(lengths))):
        found = prefill.logits(packed, lengths, pages, wanted)
        assert found[:, :3].tolist() == packed[:, wanted].T.tolist()
        row_of = np.repeat(np.arange(len(rows)), lengths)[wanted]
        for line, row in zip(found[:, 3:].tolist(), row_of, strict=True):
            assert line[: len(pages[row])] == pages[row]
    assert all(size in short_prefill.SIZES and block in (1, 8, 16) for size, block in decoder.sizes)


def test_few_tokens_are_taken_at_once_and_many_when_they_come_again() -> None:
    prefill = short_prefill.ShortPrefill(Mirror(), WIDTH, 8, torch.device("cpu"))
    assert prefill.takes([700, 300], [0, 4000])
    assert [prefill.takes([700, 500], [0, 0]) for _ in range(3)] == [False, True, True]
    assert prefill.takes([1300], [0])  # of the same size
    assert [prefill.takes([4500, 4500], [0, 0]) for _ in range(2)] == [False, True]
    assert not any(prefill.takes([4700, 4700], [0, 0]) for _ in range(2))


@pytest.mark.parametrize("lengths", [[1] * 1100, [9000]])
def test_what_would_be_filled_up_or_reads_too_much_is_not_taken(lengths: list[int]) -> None:
    prefill = short_prefill.ShortPrefill(Mirror(), WIDTH, 8, torch.device("cpu"))
    assert not any(prefill.takes(lengths, [30_000] * len(lengths)) for _ in range(2))
