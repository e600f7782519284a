import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms import advantages as module
from lockstep.algorithms.advantages import compute_advantage, gae, get_adv_estimator, grpo, required_inputs
from lockstep.errors import ConfigError

PROPERTY = settings(max_examples=50, deadline=None)


@pytest.fixture
def scratch_registry(monkeypatch):
    """Registrations of one test, gone after it."""
    monkeypatch.setattr(module, "ADV_ESTIMATORS", dict(module.ADV_ESTIMATORS))


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


def slow_grpo(rewards, mask, group, normalise):
    scores = {i: sum(rewards[i][mask[i]].tolist()) for i in range(len(mask)) if mask[i].any()}
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for i, score in scores.items():
        peers = [s for j, s in scores.items() if group[j] == group[i]]
        advantage = score
        if len(peers) > 1:
            advantage = score - statistics.fmean(peers)
            if normalise:
                advantage /= statistics.stdev(peers) + 1e-6
        advantages[i][mask[i]] = advantage
        returns[i][mask[i]] = score
    return advantages, returns


@PROPERTY
@given(data=st.data(), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_its_definition_over_the_tokens_of_the_policy(data, gamma, lam, masks, numbers):
    mask = data.draw(masks)
    rewards, values = data.draw(numbers(mask)), data.draw(numbers(mask))
    actual = gae(token_level_rewards=rewards, response_mask=mask, values=values, gamma=gamma, lam=lam)
    for a, b in zip(actual, slow_gae(rewards, values, mask, gamma, lam), strict=True):
        close(a, b)


def test_gae_by_hand_skips_a_tool_token():
    _, returns = gae(
        token_level_rewards=torch.tensor([[0.0, 9.0, 1.0]]),
        response_mask=torch.tensor([[1, 0, 1]]),
        values=torch.tensor([[0.5, 9.0, 0.25]]),
        gamma=0.5,
        lam=0.5,
    )
    # Last token: A = 1 - 0.25 = 0.75. First: delta = 0.5 * 0.25 - 0.5 = -0.375, A = -0.375 + 0.25 * 0.75 = -0.1875.
    assert returns.tolist() == [[0.3125, 0.0, 1.0]]


@PROPERTY
@given(data=st.data(), normalise=st.booleans())
def test_grpo_compares_each_row_with_the_counted_rows_of_its_group(data, normalise, masks, numbers):
    mask = data.draw(masks)
    rewards = data.draw(numbers(mask))
    group = torch.tensor(data.draw(st.lists(st.sampled_from([-3, 0, 10**12]), min_size=len(mask), max_size=len(mask))))
    actual = grpo(token_level_rewards=rewards, response_mask=mask, group=group, norm_adv_by_std_in_grpo=normalise)
    for a, b in zip(actual, slow_grpo(rewards, mask, group, normalise), strict=True):
        close(a, b)


def test_grpo_gives_equal_scores_no_advantage_in_float32():
    advantages, _ = grpo(
        token_level_rewards=torch.full((7, 1), 0.1),
        response_mask=torch.ones(7, 1),
        group=torch.zeros(7, dtype=torch.int64),
        norm_adv_by_std_in_grpo=True,
    )
    assert advantages.dtype == torch.float32
    assert advantages.abs().max() < 1e-9


def test_grpo_refuses_a_group_that_is_not_one_number_a_row():
    with pytest.raises(ValueError, match="2 rows"):
        grpo(
            token_level_rewards=torch.ones(2, 3),
            response_mask=torch.ones(2, 3),
            group=torch.zeros(2, 1, dtype=torch.int64),
            norm_adv_by_std_in_grpo=True,
        )


def test_an_estimator_says_what_it_requires():
    assert set(required_inputs("gae")) == {"token_level_rewards", "response_mask", "values", "gamma", "lam"}
    assert "values" not in required_inputs("grpo")


def test_an_unknown_estimator_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'grpoo'; did you mean 'grpo'\? Known: gae, grpo"):
        get_adv_estimator("grpoo")


@pytest.mark.usefixtures("scratch_registry")
def test_an_estimator_gets_the_inputs_its_signature_names_and_no_others():
    @module.register_adv_est("probe")
    def probe(*, response_mask, gamma=0.5, lam=0.25):
        return response_mask, (gamma, lam)

    assert required_inputs("probe") == ("response_mask",)
    assert compute_advantage("probe", {"response_mask": 1, "lam": 0.75, "values": 2}) == (1, (0.5, 0.75))


@pytest.mark.parametrize("available", [{"gamma": 1.0, "values": None}, {"gamma": 1.0}])
def test_a_missing_input_is_named_with_its_estimator(available):
    with pytest.raises(ConfigError, match=r"'gae' needs token_level_rewards, response_mask, values, lam.*has gamma"):
        compute_advantage("gae", available)


@pytest.mark.usefixtures("scratch_registry")
def test_an_estimator_with_positional_arguments_is_refused_when_registered():
    with pytest.raises(ConfigError, match=r"'rewards'.*keyword-only"):
        module.register_adv_est("positional")(lambda rewards: (rewards, rewards))
    assert "positional" not in module.ADV_ESTIMATORS
