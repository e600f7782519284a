from __future__ import annotations

import pytest

from lockstep.errors import DataError
from lockstep.rewards.graders.exact_match import compute_score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [("cba", "cba", 1.0), (" cba\n", "cba ", 1.0), ("cb a", "cba", 0.0), ("CBA", "cba", 0.0), ("", "cba", 0.0)],
)
def test_equality_ignores_only_white_space_around(response, truth, score):
    assert compute_score(response, truth) == score


def test_a_missing_ground_truth_is_an_error_even_where_the_response_is_its_name():
    with pytest.raises(DataError, match="ground_truth"):
        compute_score("None", None)
