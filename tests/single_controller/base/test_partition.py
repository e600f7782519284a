import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.single_controller.base.partition import balanced_partition, row_cost


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 9))
def test_every_index_once_in_order_and_no_part_above_the_average_by_more_than_the_largest_size(
    sizes: list[int], parts: int
) -> None:
    shares = balanced_partition(sizes, parts)

    assert len(shares) == parts
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) <= sum(sizes) / parts + max(sizes, default=0)


@given(st.integers(0, 5), st.integers(0, 30), st.integers(1, 7))
def test_equal_sizes_give_counts_that_differ_by_at_most_one(size: int, rows: int, parts: int) -> None:
    counts = [len(share) for share in balanced_partition([size] * rows, parts)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(("sizes", "parts"), [([1, 2], 0), ([1, -2], 2)])
def test_bad_arguments_are_refused(sizes: list[int], parts: int) -> None:
    with pytest.raises(ValueError, match=r"parts must be|negative, got -2"):
        balanced_partition(sizes, parts)


def test_a_long_row_costs_more_than_its_tokens_in_short_rows() -> None:
    assert row_cost(32768) == 2 * 32768
    assert 8 * row_cost(512) == pytest.approx(8 * 512, rel=0.02)
