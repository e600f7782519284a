import pytest
import torch

from lockstep.algorithms.advantages.recursion import discounted_sums, selected
from lockstep.algorithms.rows import Rows


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_sums_run_from_the_last_token_of_each_row_to_its_first(discount):
    rows = [[1.0, 2.0], [], [4.0, 8.0, 16.0], [32.0], [64.0, 0.25, 0.5]]
    expected = [[sum(discount**j * x for j, x in enumerate(row[t:])) for t in range(len(row))] for row in rows]
    x = torch.tensor([v for row in rows for v in row])
    found = discounted_sums(x, Rows(torch.tensor([len(row) for row in rows])), discount)
    assert found.tolist() == [v for row in expected for v in row]
    assert x[0] == 1.0  # what it was given stays as it is


def test_a_batch_without_tokens_has_no_sums():
    assert discounted_sums(torch.zeros(0), Rows(torch.tensor([0, 0])), 0.5).shape == (0,)


def test_selected_tokens_have_their_places_and_rows():
    places, rows = selected(torch.tensor([0, 1, 1, 0, 1]), Rows(torch.tensor([2, 0, 1, 2])))
    assert places.tolist() == [1, 2, 4]
    assert rows.lengths.tolist() == [1, 0, 1, 1]
