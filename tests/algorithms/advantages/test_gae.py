import math
import statistics

import torch
from helpers.blocks import estimate
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.advantages import gae

PROPERTY = settings(max_examples=50, deadline=None)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def slow_gae(rewards, values, mask, gamma, lam):
    """The definition: A_k is the sum over j >= k of (gamma lam)^(j-k) delta_j, over the tokens of the policy only."""
    raw, returns = {}, torch.zeros_like(rewards)
    for i in range(len(mask)):
        at = [t for t in range(mask.shape[1]) if mask[i, t]]
        r, v = [rewards[i, t].item() for t in at], [values[i, t].item() for t in at] + [0.0]
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(at))]
        for k, t in enumerate(at):
            raw[i, t] = math.fsum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(at)))
            returns[i, t] = raw[i, t] + v[k]
    shift, scale = 0.0, 1.0
    if len(raw) >= 2:
        shift, scale = statistics.fmean(raw.values()), 1 / math.sqrt(statistics.variance(raw.values()) + 1e-8)
    advantages = torch.zeros_like(rewards)
    for at, value in raw.items():
        advantages[at] = (value - shift) * scale
    return advantages, returns


@PROPERTY
@given(data=st.data(), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_its_definition_over_the_tokens_of_the_policy(data, gamma, lam, masks, numbers):
    mask = data.draw(masks)
    rewards, values = data.draw(numbers(mask)), data.draw(numbers(mask))
    actual = estimate(gae, token_level_rewards=rewards, response_mask=mask, values=values, gamma=gamma, lam=lam)
    for a, b in zip(actual, slow_gae(rewards, values, mask, gamma, lam), strict=True):
        close(a, b)


def test_gae_by_hand_skips_a_tool_token():
    _, returns = estimate(
        gae,
        token_level_rewards=torch.tensor([[0.0, 9.0, 1.0]]),
        response_mask=torch.tensor([[1, 0, 1]]),
        values=torch.tensor([[0.5, 9.0, 0.25]]),
        gamma=0.5,
        lam=0.5,
    )
    # Last token: A = 1 - 0.25 = 0.75. First: delta = 0.5 * 0.25 - 0.5 = -0.375, A = -0.375 + 0.25 * 0.75 = -0.1875.
    assert returns.tolist() == [[0.3125, 0.0, 1.0]]
