import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.advantages import gae
from lockstep.algorithms.advantages.returns import reinforce_plus_plus, reinforce_plus_plus_baseline

PROPERTY = settings(max_examples=50, deadline=None)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def slow_whiten(raw, like):
    """{(i, t): number} whitened over all its entries, as a tensor. `mean` is exact where `fmean` rounds."""
    shift, scale = 0.0, 1.0
    if len(raw) >= 2:
        shift, scale = statistics.mean(raw.values()), 1 / math.sqrt(statistics.variance(raw.values()) + 1e-8)
    result = torch.zeros_like(like)
    for at, value in raw.items():
        result[at] = (value - shift) * scale
    return result


@PROPERTY
@given(data=st.data(), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_reinforce_plus_plus_whitens_the_discounted_rewards_to_come(data, gamma, masks, numbers):
    mask = data.draw(masks)
    rewards = data.draw(numbers(mask))
    raw, returns = {}, torch.zeros_like(rewards)
    for i in range(len(mask)):
        at = [t for t in range(mask.shape[1]) if mask[i, t]]
        for k, t in enumerate(at):
            raw[i, t] = math.fsum(gamma ** (j - k) * rewards[i, at[j]].item() for j in range(k, len(at)))
            returns[i, t] = raw[i, t]
    actual = reinforce_plus_plus(token_level_rewards=rewards, response_mask=mask, gamma=gamma)
    close(actual, (slow_whiten(raw, rewards), returns))


@PROPERTY
@given(data=st.data())
def test_the_baseline_variant_whitens_the_distance_to_the_groups_mean(data, masks, numbers):
    mask = data.draw(masks)
    rewards = data.draw(numbers(mask))
    group = torch.tensor(data.draw(st.lists(st.sampled_from([-3, 0, 10**12]), min_size=len(mask), max_size=len(mask))))
    scores = {i: sum(rewards[i][mask[i]].tolist()) for i in range(len(mask)) if mask[i].any()}
    raw, returns = {}, torch.zeros_like(rewards)
    for i, score in scores.items():
        peers = [s for j, s in scores.items() if group[j] == group[i]]
        for t in mask[i].nonzero().flatten().tolist():
            raw[i, t] = score - statistics.fmean(peers) if len(peers) > 1 else score
            returns[i, t] = score
    actual = reinforce_plus_plus_baseline(token_level_rewards=rewards, response_mask=mask, group=group)
    close(actual, (slow_whiten(raw, rewards), returns))


@PROPERTY
@given(data=st.data(), gamma=st.sampled_from([0.5, 1.0]))
def test_without_a_critic_and_with_lambda_one_gae_is_reinforce_plus_plus(data, gamma, masks, numbers):
    mask = data.draw(masks)
    inputs = {"token_level_rewards": data.draw(numbers(mask)), "response_mask": mask, "gamma": gamma}
    close(reinforce_plus_plus(**inputs), gae(**inputs, values=torch.zeros(mask.shape, dtype=torch.float64), lam=1.0))


@PROPERTY
@given(data=st.data(), shift=st.sampled_from([-8.0, 0.5, 4.0]), scale=st.sampled_from([0.5, 4.0]))
def test_the_baseline_variant_ignores_a_groups_level_and_the_scale_of_all_scores(data, shift, scale):
    scores = torch.tensor(data.draw(st.lists(st.integers(-3, 3), min_size=5, max_size=5)), dtype=torch.float64)[:, None]
    group = torch.tensor([0, 0, 1, 1, 1])

    def advantages(rewards):
        return reinforce_plus_plus_baseline(token_level_rewards=rewards, response_mask=torch.ones_like(rewards), group=group)[0]

    plain = advantages(scores)
    close(advantages(scores + shift * (group == 1)[:, None]), plain)
    # 1e-8 is added to the variance.
    torch.testing.assert_close(advantages(scale * scores), plain, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_baseline_variant_gives_exactly_zero_when_every_group_is_of_equal_scores(dtype):
    rewards = torch.tensor([0.1] * 7 + [0.3] * 3, dtype=dtype)[:, None]
    advantages, _ = reinforce_plus_plus_baseline(
        token_level_rewards=rewards, response_mask=torch.ones(10, 1), group=torch.tensor([4] * 7 + [2] * 3)
    )
    assert advantages.dtype == dtype
    assert not advantages.any()


def test_a_tool_token_costs_no_discount():
    _, returns = reinforce_plus_plus(
        token_level_rewards=torch.tensor([[0.0, 9.0, 1.0]]), response_mask=torch.tensor([[1, 0, 1]]), gamma=0.5
    )
    assert returns.tolist() == [[0.5, 0.0, 1.0]]
