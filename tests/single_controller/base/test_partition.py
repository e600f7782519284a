import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base.partition import balanced_partition, row_cost, share_rows


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


@given(groups=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=40), parts=st.integers(1, 4))
def test_rows_of_a_prompt_stay_together_where_there_are_enough_prompts(groups: list[tuple[int, int]], parts: int) -> None:
    prompts = [[number] * length for number, (length, samples) in enumerate(groups) for _ in range(samples)]
    batch = DataProto.from_dict({"prompts": Ragged.from_rows(prompts)})
    shares = share_rows(batch, parts)
    assert sorted(row for share in shares for row in share) == list(range(len(prompts)))
    costs = [row_cost(len(prompt)) for prompt in prompts]
    loads = [sum(costs[row] for row in share) for share in shares]
    if len(groups) >= 4 * parts:
        owners = [next(rank for rank, share in enumerate(shares) if row in share) for row in range(len(prompts))]
        assert all(owners[i] == owners[i - 1] for i in range(1, len(prompts)) if prompts[i] == prompts[i - 1])
        largest = max(samples * row_cost(length) for length, samples in groups)
        assert max(loads) <= sum(costs) / parts + largest
    else:
        assert shares == balanced_partition(costs, parts)
