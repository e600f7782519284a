import math
import statistics

import pytest
import torch
from helpers.blocks import estimate
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.advantages import gae
from lockstep.algorithms.advantages.returns import gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax

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
    actual = estimate(reinforce_plus_plus, token_level_rewards=rewards, response_mask=mask, gamma=gamma)
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
    actual = estimate(reinforce_plus_plus_baseline, token_level_rewards=rewards, response_mask=mask, group=group)
    close(actual, (slow_whiten(raw, rewards), returns))


@PROPERTY
@given(data=st.data(), gamma=st.sampled_from([0.5, 1.0]))
def test_without_a_critic_and_with_lambda_one_gae_is_reinforce_plus_plus(data, gamma, masks, numbers):
    mask = data.draw(masks)
    inputs = {"token_level_rewards": data.draw(numbers(mask)), "response_mask": mask, "gamma": gamma}
    close(
        estimate(reinforce_plus_plus, **inputs),
        estimate(gae, **inputs, values=torch.zeros(mask.shape, dtype=torch.float64), lam=1.0),
    )


@PROPERTY
@given(data=st.data(), shift=st.sampled_from([-8.0, 0.5, 4.0]), scale=st.sampled_from([0.5, 4.0]))
def test_the_baseline_variant_ignores_a_groups_level_and_the_scale_of_all_scores(data, shift, scale):
    scores = torch.tensor(data.draw(st.lists(st.integers(-3, 3), min_size=5, max_size=5)), dtype=torch.float64)[:, None]
    group = torch.tensor([0, 0, 1, 1, 1])

    def advantages(rewards):
        return estimate(
            reinforce_plus_plus_baseline, token_level_rewards=rewards, response_mask=torch.ones_like(rewards), group=group
        )[0]

    plain = advantages(scores)
    close(advantages(scores + shift * (group == 1)[:, None]), plain)
    # 1e-8 is added to the variance.
    torch.testing.assert_close(advantages(scale * scores), plain, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_baseline_variant_gives_exactly_zero_when_every_group_is_of_equal_scores(dtype):
    rewards = torch.tensor([0.1] * 7 + [0.3] * 3, dtype=dtype)[:, None]
    advantages, _ = estimate(
        reinforce_plus_plus_baseline,
        token_level_rewards=rewards,
        response_mask=torch.ones(10, 1),
        group=torch.tensor([4] * 7 + [2] * 3),
    )
    assert advantages.dtype == dtype
    assert not advantages.any()


def test_a_tool_token_costs_no_discount():
    _, returns = estimate(
        reinforce_plus_plus, token_level_rewards=torch.tensor([[0.0, 9.0, 1.0]]), response_mask=torch.tensor([[1, 0, 1]]), gamma=0.5
    )
    assert returns.tolist() == [[0.5, 0.0, 1.0]]


@PROPERTY
@given(data=st.data(), normalise=st.booleans(), weights=st.sampled_from([None, [0.5, 2.0, 0.0]]))
def test_gdpo_normalises_each_part_in_its_group_then_sums_and_whitens(data, normalise, weights, masks, numbers):
    mask = data.draw(masks)
    rewards = data.draw(numbers(mask))
    parts = data.draw(numbers(torch.ones(len(mask), 3, dtype=torch.bool)))
    parts[~mask.any(1)] = torch.nan
    group = torch.tensor(data.draw(st.lists(st.sampled_from([-3, 0, 10**12]), min_size=len(mask), max_size=len(mask))))
    counted = [i for i in range(len(mask)) if mask[i].any()]
    raw, returns = {}, torch.zeros_like(rewards)
    for i in counted:
        peers = [j for j in counted if group[j] == group[i]]
        total = 0.0
        for k in range(3):
            own = parts[i, k].item()
            if len(peers) > 1:
                own -= statistics.fmean(parts[j, k].item() for j in peers)
                own /= statistics.stdev(parts[j, k].item() for j in peers) + 1e-6 if normalise else 1.0
            total += own * (1.0 if weights is None else weights[k])
        for t in mask[i].nonzero().flatten().tolist():
            raw[i, t] = total
            returns[i, t] = sum(rewards[i][mask[i]].tolist())
    actual = estimate(
        gdpo,
        token_level_rewards=rewards,
        response_mask=mask,
        group=group,
        reward_parts=parts,
        reward_part_weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
        norm_adv_by_std_in_grpo=normalise,
    )
    torch.testing.assert_close(actual, (slow_whiten(raw, rewards), returns), rtol=1e-9, atol=1e-9)


def test_gdpo_gives_a_narrow_part_the_same_voice_as_a_wide_one():
    parts = torch.tensor([[100.0, 0.0], [0.0, 0.01], [0.0, 0.0], [100.0, 0.01]], dtype=torch.float64)
    mask = torch.ones(4, 1)
    advantages, _ = estimate(
        gdpo,
        token_level_rewards=parts.sum(1, keepdim=True),
        response_mask=mask,
        group=torch.zeros(4),
        reward_parts=parts,
        norm_adv_by_std_in_grpo=True,
    )
    first, second, worst, best = advantages.flatten().tolist()
    assert first == pytest.approx(second, abs=1e-3)
    assert worst < first < best


@pytest.mark.parametrize("wrong", [{"reward_parts": torch.ones(3, 2)}, {"reward_part_weights": torch.ones(3)}])
def test_parts_that_do_not_fit_are_refused(wrong):
    inputs = {"token_level_rewards": torch.ones(2, 1), "response_mask": torch.ones(2, 1), "group": torch.zeros(2)}
    inputs["norm_adv_by_std_in_grpo"] = True
    with pytest.raises(ValueError, match="part"):
        estimate(gdpo, **inputs, **({"reward_parts": torch.ones(2, 2)} | wrong))


@PROPERTY
@given(data=st.data())
def test_remax_is_the_reward_to_come_less_the_greedy_score(data, masks, numbers):
    mask = data.draw(masks)
    rewards = data.draw(numbers(mask))
    baselines = data.draw(numbers(torch.ones(len(mask), 1, dtype=torch.bool))).flatten()
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for i in range(len(mask)):
        at = mask[i].nonzero().flatten().tolist()
        for k, t in enumerate(at):
            returns[i, t] = math.fsum(rewards[i, j].item() for j in at[k:])
            advantages[i, t] = returns[i, t] - baselines[i]
    close(estimate(remax, token_level_rewards=rewards, response_mask=mask, reward_baselines=baselines), (advantages, returns))


def test_remax_refuses_baselines_that_are_not_one_number_per_row():
    with pytest.raises(ValueError, match="2 rows"):
        estimate(remax, token_level_rewards=torch.ones(2, 3), response_mask=torch.ones(2, 3), reward_baselines=torch.ones(2, 1))
