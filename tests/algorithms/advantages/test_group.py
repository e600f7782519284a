import statistics

import pytest
import torch
from helpers import blocks
from hypothesis import given, settings
from hypothesis import strategies as st

PROPERTY = settings(max_examples=50, deadline=None)
GROUP_ESTIMATORS = ("grpo", "grpo_passk", "rloo", "opo", "gpg")


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def estimate(name, rewards, mask, group, normalise=True):
    inputs = {"token_level_rewards": rewards, "response_mask": mask, "group": group, "norm_adv_by_std_in_grpo": normalise}
    return blocks.estimate(name, **inputs)


def of_scores(name, scores, group, normalise=True, dtype=torch.float64):
    """Advantages of rows of one token."""
    rewards = torch.tensor(scores, dtype=dtype)[:, None]
    return estimate(name, rewards, torch.ones_like(rewards), torch.tensor(group), normalise)[0].flatten()


def slow_advantage(name, i, scores, lengths, peers, normalise):
    """The advantage of row i; `scores` and `lengths` are of all rows that count, `peers` the rows of its group, with i."""
    own, others = scores[i], [scores[j] for j in peers if j != i]
    alpha = len(scores) / max(sum(s != 0 for s in scores.values()), 1)
    if not others:
        return {"grpo_passk": 0.0, "gpg": alpha * own}.get(name, own)
    std = statistics.stdev(scores[j] for j in peers) + 1e-6 if normalise else 1.0
    mean = statistics.fmean(scores[j] for j in peers)
    match name:
        case "grpo":
            return (own - mean) / std
        case "grpo_passk":
            return max(own - max(others), 0.0) / std
        case "rloo":
            return own - statistics.fmean(others)
        case "opo":
            return own - sum(lengths[j] * scores[j] for j in peers) / sum(lengths[j] for j in peers)
        case "gpg":
            return alpha * (own - mean)


@st.composite
def batches(draw, masks, numbers):
    """(rewards, mask, group): scores with and without ties, groups of any size, with any numbers for names."""
    mask = draw(masks)
    rewards = draw(numbers(mask))
    if draw(st.booleans()):
        rewards = rewards.round()
    group = draw(st.lists(st.sampled_from([-3, 0, 10**12]), min_size=len(mask), max_size=len(mask)))
    return rewards, mask, torch.tensor(group)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@PROPERTY
@given(data=st.data(), normalise=st.booleans())
def test_each_row_is_compared_with_the_counted_rows_of_its_group(name, data, normalise, masks, numbers):
    rewards, mask, group = data.draw(batches(masks, numbers))
    scores = {i: sum(rewards[i][mask[i]].tolist()) for i in range(len(mask)) if mask[i].any()}
    lengths = {i: int(mask[i].sum()) for i in scores}
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for i, score in scores.items():
        peers = [j for j in scores if group[j] == group[i]]
        advantages[i][mask[i]] = slow_advantage(name, i, scores, lengths, peers, normalise)
        returns[i][mask[i]] = score
    close(estimate(name, rewards, mask, group, normalise), (advantages, returns))


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_give_exactly_zero(name, dtype):
    # The mean of seven times 0.1 is not 0.1, neither in float32 nor in float64.
    advantages = of_scores(name, [0.1] * 7 + [0.3] * 3, [4] * 7 + [2] * 3, dtype=dtype)
    assert advantages.dtype == dtype
    assert advantages.tolist() == [0.0] * 10


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("normalise", [True, False])
def test_a_group_of_one_has_the_baseline_zero_and_no_margin(name, normalise):
    rewards, mask = torch.tensor([[2.0], [-3.0], [9.0]]), torch.tensor([[1], [1], [0]])
    # The third row shares the group of the first, but has no token.
    advantages, _ = estimate(name, rewards, mask, torch.tensor([0, 1, 0]), normalise)
    assert advantages.flatten().tolist() == ([0.0, 0.0, 0.0] if name == "grpo_passk" else [2.0, -3.0, 0.0])


@pytest.mark.parametrize("name", [name for name in GROUP_ESTIMATORS if name != "gpg"])
@PROPERTY
@given(data=st.data(), normalise=st.booleans(), shift=st.sampled_from([-8.0, 0.5, 4.0]))
def test_adding_a_constant_to_a_groups_scores_changes_no_advantage(name, data, normalise, shift):
    scores = data.draw(st.lists(st.integers(-3, 3), min_size=2, max_size=6))
    group = [0] * len(scores)
    close(of_scores(name, [s + shift for s in scores], group, normalise), of_scores(name, scores, group, normalise))


@pytest.mark.parametrize(
    ("name", "normalise", "power"),
    [("grpo", True, 0), ("grpo_passk", True, 0), *[(name, False, 1) for name in GROUP_ESTIMATORS]],
)
@PROPERTY
@given(data=st.data(), scale=st.sampled_from([0.5, 3.0, 16.0]))
def test_advantages_scale_with_the_scores_unless_the_deviation_is_divided_out(name, normalise, power, data, scale):
    scores = data.draw(st.lists(st.integers(-3, 3), min_size=2, max_size=6))
    group = [0] * len(scores)
    expected = scale**power * of_scores(name, scores, group, normalise)
    # 1e-6 is added to the deviation, which is at least 0.2 here.
    close(of_scores(name, [scale * s for s in scores], group, normalise), expected, 1e-12 if power else 1e-4)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg"])
@PROPERTY
@given(scores=st.lists(st.floats(-9, 9), min_size=2, max_size=6))
def test_advantages_of_a_group_sum_to_zero(name, scores):
    assert of_scores(name, scores, [0] * len(scores)).sum().abs() < 1e-9


def test_opos_advantages_sum_to_zero_over_tokens():
    mask = torch.tensor([[1, 0, 0, 0], [1, 0, 1, 1]])
    rewards = torch.tensor([[1.0, 9, 9, 9], [0, 9, 0, 0]], dtype=torch.float64)
    advantages, _ = estimate("opo", rewards, mask, torch.tensor([0, 0]))
    # The baseline is (1 * 1 + 3 * 0) / 4.
    assert advantages.tolist() == [[0.75, 0.0, 0.0, 0.0], [-0.25, 0.0, -0.25, -0.25]]


def test_rloo_compares_with_the_mean_of_the_others():
    assert of_scores("rloo", [1.0, 0.0, 0.0, 5.0], [0, 0, 0, 1]).tolist() == [1.0, -0.5, -0.5, 5.0]


def test_gpg_enlarges_by_the_share_of_scores_that_are_not_zero():
    assert of_scores("gpg", [1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1]).tolist() == [2.0, -2.0, 0.0, 0.0]
    assert of_scores("gpg", [0.0, 0.0], [0, 0]).tolist() == [0.0, 0.0]


def test_passk_gives_the_margin_to_the_one_best_row_and_nothing_to_a_shared_best():
    scores, group = [0.25, 1.0, 0.5, 1.0, 1.0, 0.0], [0, 0, 0, 1, 1, 1]
    assert of_scores("grpo_passk", scores, group, normalise=False).tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_not_finite_shows(name, bad):
    assert not of_scores(name, [1.0, bad, 0.0], [0, 0, 0]).isfinite().all()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_that_is_not_one_number_per_row_is_refused(name):
    with pytest.raises(ValueError, match="2 rows"):
        estimate(name, torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64))
