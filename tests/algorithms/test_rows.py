"""Rows against loops over rows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.rows import Rows

LENGTHS = st.lists(st.integers(0, 6), max_size=6)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 1000))
def test_sums_means_and_places_are_those_of_a_loop_over_rows(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, total = Rows(torch.tensor(lengths, dtype=torch.int64)), sum(lengths)
    x, mask = torch.randn(total, generator=generator), torch.rand(total, generator=generator) < 0.7
    parts, masks = x.split(lengths), mask.split(lengths)
    assert rows.num_tokens == total
    assert len(rows) == len(lengths)
    assert torch.allclose(rows.sum(x), torch.tensor([float(part.sum()) for part in parts]), atol=1e-6)
    means = [float(part[m].mean()) if m.any() else 0.0 for part, m in zip(parts, masks, strict=True)]
    assert torch.allclose(rows.mean(x, mask), torch.tensor(means), atol=1e-6)
    assert rows.index.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert rows.positions.tolist() == [t for n in lengths for t in range(n)]
    assert torch.equal(rows.unpad(rows.pad(x)), x)
    assert torch.equal(rows.spread(torch.arange(len(lengths))), rows.index)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS.filter(bool), seed=st.integers(0, 1000))
def test_a_rows_sum_is_the_same_to_the_bit_whatever_lies_beside_it(lengths: list[int], seed: int) -> None:
    x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed))
    together = Rows(torch.tensor(lengths)).sum(x)
    alone = [Rows(torch.tensor([n])).sum(part)[0] for n, part in zip(lengths, x.split(lengths), strict=True)]
    assert together.tolist() == [float(one) for one in alone]


def test_the_gradient_of_a_sum_reaches_every_token() -> None:
    x = torch.randn(5, requires_grad=True)
    weights = torch.tensor([2.0, 5.0, 3.0])
    (Rows(torch.tensor([3, 0, 2])).sum(x) * weights).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0, 3.0, 3.0]


def test_a_padded_block_is_rows_of_one_length() -> None:
    block = torch.arange(6.0).view(2, 3)
    rows = Rows.of_padded(block)
    assert rows.sum(block.flatten()).tolist() == [3.0, 12.0]
