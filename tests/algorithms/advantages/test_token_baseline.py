import math

import torch
from helpers.blocks import estimate
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.advantages.token_baseline import optimal_token_baseline

PROPERTY = settings(max_examples=50, deadline=None)


def slow(rewards, mask, group, log_probs, squares, weights):
    """The definition, over the k-th tokens of the policy in each row."""
    rows = []
    for i in range(len(mask)):
        at = mask[i].nonzero().flatten().tolist()
        g = [math.fsum(rewards[i, t].item() for t in at[k:]) for k in range(len(at))]
        energy, w = 0.0, []
        for t in at:
            pi = math.exp(log_probs[i, t].item())
            step = (1 - pi) ** 2 if squares is None else 1 - 2 * pi + squares[i, t].item()
            energy += step * (1.0 if weights is None else weights[i, t].item() ** 2)
            w.append(energy)
        rows.append((at, g, w))
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for i, (at, g, _) in enumerate(rows):
        for k, t in enumerate(at):
            peers = [j for j in range(len(mask)) if group[j] == group[i] and len(rows[j][0]) > k]
            total = math.fsum(rows[j][2][k] + 1e-12 for j in peers)
            baseline = math.fsum((rows[j][2][k] + 1e-12) * rows[j][1][k] for j in peers) / total
            advantages[i, t] = g[k] - (baseline if len(peers) > 1 else 0.0)
            returns[i, t] = g[k]
    return advantages, returns


@PROPERTY
@given(data=st.data(), with_squares=st.booleans(), with_weights=st.booleans())
def test_the_baseline_is_the_mean_of_the_group_at_the_same_token_weighted_by_energy(
    data, with_squares, with_weights, masks, numbers
):
    mask = data.draw(masks)
    rewards = data.draw(numbers(mask))
    log_probs = -data.draw(numbers(mask)).abs()
    pi = log_probs.exp()
    # The sum of squares is between pi^2 and pi^2 + (1 - pi)^2.
    squares = pi.square() + 0.3 * (1 - pi).square() if with_squares else None
    weights = data.draw(numbers(mask)).abs().clamp(max=2.0) if with_weights else None
    group = torch.tensor(data.draw(st.lists(st.sampled_from([-3, 0, 10**12]), min_size=len(mask), max_size=len(mask))))
    actual = estimate(
        optimal_token_baseline,
        token_level_rewards=rewards,
        response_mask=mask,
        group=group,
        old_log_probs=log_probs,
        sum_pi_squared=squares,
        rollout_is_weights=weights,
    )
    torch.testing.assert_close(actual, slow(rewards, mask, group, log_probs, squares, weights), rtol=1e-9, atol=1e-9)


def test_tool_tokens_are_skipped_and_a_row_that_outlasts_the_others_has_the_baseline_zero():
    rewards = torch.tensor([[0.0, 9.0, 1.0, 9.0], [0.0, 2.0, 9.0, 9.0], [0.0, 0.0, 0.0, 3.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    even = torch.full_like(rewards, math.log(0.5))
    advantages, returns = estimate(
        optimal_token_baseline, token_level_rewards=rewards, response_mask=mask, group=torch.zeros(3), old_log_probs=even
    )
    assert returns.tolist() == [[1.0, 0.0, 1.0, 0.0], [2.0, 2.0, 0.0, 0.0], [3.0, 3.0, 3.0, 3.0]]
    expected = torch.tensor([[-1.0, 0.0, -1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 3.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected)


def test_tokens_that_were_certain_have_the_plain_mean_as_baseline():
    rewards = torch.tensor([[1.0], [4.0]], dtype=torch.float64)
    advantages, _ = estimate(
        optimal_token_baseline,
        token_level_rewards=rewards,
        response_mask=torch.ones(2, 1),
        group=torch.zeros(2),
        old_log_probs=torch.zeros_like(rewards),
    )
    torch.testing.assert_close(advantages.flatten().tolist(), [-1.5, 1.5])
