import pytest
import torch

from lockstep.algorithms.advantages.gae import gae
from lockstep.algorithms.advantages.recursion import discounted_sums, selected, turn_discount
from lockstep.algorithms.advantages.returns import rewards_to_go
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


def test_a_discount_per_turn_counts_turns_and_not_tokens():
    """Against sums over turns, with tokens of an environment between them."""
    turns = [[1, 1, 1, 2, 2, 3], [1], [1, 1, 2, 2]]
    mask = [[1, 1, 0, 1, 0, 1], [1], [1, 0, 1, 1]]
    rewards = [[1.0, 2.0, 9.0, 4.0, 9.0, 8.0], [3.0], [5.0, 9.0, 7.0, 6.0]]
    rows = Rows(torch.tensor([len(row) for row in turns]))
    flat = [torch.tensor([x for row in column for x in row]) for column in (turns, mask, rewards)]
    factors = turn_discount(flat[0], flat[1], rows, 0.5)
    found = rewards_to_go(flat[2], flat[1], rows, factors)
    expected = [
        sum(r * 0.5 ** (u - turn) for r, u, m in zip(reward[t:], row[t:], own[t:], strict=True) if m) if own[t] else 0.0
        for row, own, reward in zip(turns, mask, rewards, strict=True)
        for t, turn in enumerate(row)
    ]
    assert found.tolist() == expected
    _, returns = gae(
        token_level_rewards=flat[2], response_mask=flat[1], rows=rows, values=torch.zeros(rows.num_tokens), gamma=factors, lam=1.0
    )
    assert returns.tolist() == expected  # without values GAE is the rewards to come
