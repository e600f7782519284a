"""What the host sends to the rows of a device and reads from them, in one piece each. Plain tensors."""

from __future__ import annotations

import numpy as np
import torch
from helpers.fake_gpu import rows
from hypothesis import given
from hypothesis import strategies as st


def make() -> rows.RowState:
    state = rows.RowState.make(6, 3, 50, 1, torch.device("cpu"))
    for tensor in (state.longs, state.ints, state.page_table, state.out_tokens):
        tensor.copy_(torch.randint(1, 99, tensor.shape))
    for tensor in (state.floats, state.out_log_probs):
        tensor.copy_(torch.randn(tensor.shape))
    return state


@given(first=st.integers(0, 5), count=st.integers(1, 6), seed=st.integers(0, 99))
def test_numbers_arrive_at_their_rows_and_nowhere_else(first: int, count: int, seed: int) -> None:
    count = min(count, 6 - first)
    rng = np.random.default_rng(seed)
    state = make()
    before = [block.clone() for block in (state.longs, state.ints, state.floats)]
    longs = rng.integers(-(2**63), 2**63, (len(rows.LONGS), count))
    ints = rng.integers(-99, 99, (count, len(rows.INTS))).T
    floats = rng.normal(size=(count, len(rows.FLOATS))).T
    state.put(first, longs, ints, floats)
    here = slice(first, first + count)
    for block, old, new in zip((state.longs, state.ints, state.floats), before, (longs, ints, floats), strict=True):
        old[:, here] = torch.from_numpy(np.ascontiguousarray(new)).to(block.dtype)
        assert torch.equal(block, old)
    assert state.token[here].tolist() == longs[0].tolist()
    assert state.key[here].tolist() == longs[1].tolist()


@given(starts=st.lists(st.integers(0, 5 * rows.RING), max_size=6))
def test_outputs_are_read_as_they_were_from_the_first_that_is_new(starts: list[int]) -> None:
    state = make()
    count = len(starts)
    generated, done, *rings = rows.read_outputs(state.outputs(count), starts)
    assert [generated, done] == [state.generated[:count].tolist(), state.done[:count].tolist()]
    for found, ring in zip(rings, (state.out_tokens, state.out_log_probs), strict=True):
        kept = ring.tolist()
        assert found == [[kept[row][(start + i) % rows.RING] for i in range(rows.RING)] for row, start in enumerate(starts)]


def test_cleared_rows_are_copies_of_the_scratch_row() -> None:
    state = make()
    other = make()
    for name in ("longs", "ints", "floats", "page_table"):
        getattr(other, name).copy_(getattr(state, name))
    state.clear(4)
    other.gather(torch.full((4,), 6))
    for name in ("longs", "ints", "floats", "page_table"):
        assert torch.equal(getattr(state, name), getattr(other, name))
