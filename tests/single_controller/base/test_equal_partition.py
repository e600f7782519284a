"""Parts with as many rows each, and close sums."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.single_controller.base.equal_partition import equal_partition


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(0, 6), st.randoms(use_true_random=False))
def test_every_part_has_as_many_and_sums_differ_by_at_most_the_largest(parts, each, random):
    sizes = [random.randint(0, 100) for _ in range(parts * each)]
    shares = equal_partition(sizes, parts)
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    assert {len(share) for share in shares} == {each}
    sums = [sum(sizes[i] for i in share) for share in shares]
    assert max(sums) - min(sums) <= max(sizes, default=0)


def test_a_number_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="3 sizes cannot be shared among 2 parts"):
        equal_partition([1, 2, 3], 2)
