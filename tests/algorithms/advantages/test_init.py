import pytest
import torch
from helpers.blocks import estimate

from lockstep.algorithms import advantages as module
from lockstep.algorithms.advantages import bind_estimator, get_adv_estimator, required_inputs
from lockstep.algorithms.masking import masked_whiten
from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError


@pytest.fixture
def scratch_registry(monkeypatch):
    """Registrations of one test, gone after it."""
    monkeypatch.setattr(module, "ADV_ESTIMATORS", dict(module.ADV_ESTIMATORS))


def test_an_estimator_says_what_it_requires():
    assert set(required_inputs("gae")) == {"rows", "token_level_rewards", "response_mask", "values", "gamma", "lam"}
    assert "values" not in required_inputs("grpo")


def test_an_unknown_estimator_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'grpoo'; did you mean 'grpo'\? Known: gae, grpo"):
        get_adv_estimator("grpoo")


@pytest.mark.usefixtures("scratch_registry")
def test_an_estimator_gets_the_inputs_its_signature_names_and_no_others():
    @module.register_adv_est("probe")
    def probe(*, rows, response_mask, gamma=0.5, lam=0.25):
        return rows, (response_mask, gamma, lam)

    assert required_inputs("probe") == ("rows", "response_mask")
    assert bind_estimator("probe", {"lam": 0.75})({"response_mask": 1, "values": 2}, 7) == (7, (1, 0.5, 0.75))


@pytest.mark.parametrize("available", [{"gamma": 1.0, "values": None}, {"gamma": 1.0}])
def test_a_missing_input_is_named_with_its_estimator(available):
    with pytest.raises(ConfigError, match=r"'gae' needs token_level_rewards, response_mask, values, lam.*has gamma"):
        bind_estimator("gae", {})(available, available.get("rows"))


@pytest.mark.usefixtures("scratch_registry")
def test_arguments_are_matched_by_name_also_where_they_could_be_given_by_position():
    @module.register_adv_est("positional")
    def estimator(token_level_rewards, response_mask, **kwargs):
        return token_level_rewards * response_mask, token_level_rewards

    columns = {"response_mask": torch.tensor([1.0, 0.0]), "token_level_rewards": torch.tensor([3.0, 4.0])}
    advantages, _ = bind_estimator("positional", {})(columns, Rows(torch.tensor([2])))
    assert advantages.tolist() == [3.0, 0.0]
    with pytest.raises(ConfigError, match=r"'\*rewards'.*given by name"):
        module.register_adv_est("nameless")(lambda *rewards: rewards)
    assert "nameless" not in module.ADV_ESTIMATORS


# -- the special cases, the same in every estimator -------------------------------------------------------------------------

COMPARING = sorted(name for name in module.ADV_ESTIMATORS if "group" in required_inputs(name))
WHITENED = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"}


def inputs_of(scores, lengths, width=3):
    """Rows with the score on their last token; `lengths` may be 0."""
    rewards, mask = torch.zeros(len(scores), width, dtype=torch.float64), torch.zeros(len(scores), width)
    for i, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        mask[i, :length] = 1
        if length:
            rewards[i, length - 1] = score
    column = torch.tensor(scores, dtype=torch.float64)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": torch.zeros_like(rewards),
        "old_log_probs": torch.full_like(rewards, -1.0),
        "ref_log_prob": torch.full_like(rewards, -3.0),
        "reward_baselines": torch.zeros_like(column),
        "reward_parts": torch.stack([column, column], dim=1),
        "gamma": 1.0,
        "lam": 1.0,
        "norm_adv_by_std_in_grpo": True,
    }


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_of_one_has_the_baseline_zero(name):
    inputs = inputs_of([2.0, -3.0, 0.5], [2, 2, 2]) | {"group": torch.tensor([0, 1, 2])}
    advantages, _ = estimate(name, **inputs)
    expected = torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)[:, None] * inputs["response_mask"]
    if name == "grpo_passk":
        expected = torch.zeros_like(expected)  # no second best to be better than
    if name in WHITENED:
        expected = masked_whiten(expected, inputs["response_mask"])
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_equal_scores_get_exactly_zero(name, dtype):
    # The mean of seven times 0.1 is not 0.1, neither in float32 nor in float64.
    inputs = inputs_of([0.1] * 7 + [0.3] * 3, [2] * 10) | {"group": torch.tensor([4] * 7 + [2] * 3)}
    inputs["token_level_rewards"] = inputs["token_level_rewards"].to(dtype)
    advantages, _ = estimate(name, **inputs)
    assert advantages.dtype == dtype
    assert not advantages.any()


@pytest.mark.parametrize("name", sorted(module.ADV_ESTIMATORS))
def test_an_empty_row_or_one_without_a_reward_is_as_if_it_were_not_there(name):
    """The trainer masks a row whose reward is missing: whatever it holds, NaN too, reaches nothing."""
    full = inputs_of([1.0, 4.0, 2.0, 7.0], [2, 3, 0, 1]) | {"group": torch.tensor([0, 0, 0, 1])}
    for missing in ("token_level_rewards", "reward_baselines", "reward_parts", "values", "old_log_probs", "ref_log_prob"):
        full[missing][2] = torch.nan
    kept = [0, 1, 3]
    reduced = {key: x[kept] if isinstance(x, torch.Tensor) else x for key, x in full.items()}
    for x, y in zip(estimate(name, **full), estimate(name, **reduced), strict=True):
        torch.testing.assert_close(x[kept], y)
        assert not x[2].any()


@pytest.mark.parametrize("name", sorted(module.ADV_ESTIMATORS))
def test_a_batch_without_any_token_gives_zeros(name):
    inputs = inputs_of([1.0, 4.0], [0, 0]) | {"group": torch.tensor([0, 0])}
    for x in estimate(name, **inputs):
        assert x.shape == (2, 3)
        assert not x.any()


@pytest.mark.parametrize("name", sorted(module.ADV_ESTIMATORS))
def test_tool_tokens_in_the_middle_are_skipped(name):
    """The same response with the environment's tokens in between has the same advantages on the policy's own tokens."""
    plain = inputs_of([1.0, 4.0, 2.0], [2, 3, 3]) | {"group": torch.tensor([0, 0, 0]), "gamma": 0.9, "lam": 0.8}
    places = torch.tensor([0, 2, 5])
    spread = dict(plain)
    for key in ("token_level_rewards", "values", "old_log_probs", "ref_log_prob", "response_mask"):
        spread[key] = torch.full((3, 7), 0.0 if key == "response_mask" else torch.nan, dtype=torch.float64)
        spread[key][:, places] = plain[key].double()
    for x, y in zip(estimate(name, **spread), estimate(name, **plain), strict=True):
        torch.testing.assert_close(x[:, places], y)


# -- estimators of users ----------------------------------------------------------------------------------------------------

ROWS = Rows(torch.tensor([2, 0, 3]))
FLAT = {"rows": ROWS, "response_mask": torch.tensor([1, 1, 1, 0, 1]), "token_level_rewards": torch.arange(1.0, 6.0), "gamma": 2.0}


def test_a_function_that_names_rows_is_called_with_flat_columns_without_registering_it():
    def mine(*, token_level_rewards, rows, gamma):
        return rows.spread(rows.sum(token_level_rewards)) * gamma, token_level_rewards

    assert required_inputs(mine) == ("token_level_rewards", "rows", "gamma")
    advantages, returns = bind_estimator(mine, {})(FLAT, FLAT["rows"])
    assert advantages.tolist() == [6.0, 6.0, 24.0, 24.0, 24.0]
    assert returns.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    with pytest.raises(ConfigError, match="advantage estimator 'mine' needs gamma"):
        bind_estimator(mine, {})(FLAT | {"gamma": None}, FLAT["rows"])


def test_a_function_that_does_not_name_rows_gets_blocks_and_returns_them():
    seen = {}

    def mine(*, token_level_rewards, response_mask, group, values=None):
        seen.update(rewards=token_level_rewards.tolist(), mask=response_mask.tolist(), group=group, values=values)
        return token_level_rewards.flip(1).cumsum(1).flip(1), 9 * torch.ones_like(token_level_rewards)

    group = torch.tensor([0, 0, 1])
    advantages, returns = bind_estimator(mine, {})(FLAT | {"group": group}, FLAT["rows"])
    assert seen["rewards"] == [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 4.0, 5.0]]
    assert seen["mask"] == [[1, 1, 0], [0, 0, 0], [1, 0, 1]]
    assert seen["group"] is group
    assert seen["values"] is None
    assert advantages.tolist() == [3.0, 2.0, 12.0, 9.0, 5.0]
    assert returns.tolist() == [9.0] * 5


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(3, 2), 1.0])
def test_blocks_of_another_shape_are_an_error_that_names_the_estimator(wrong):
    def mine(*, response_mask):
        return response_mask, wrong

    with pytest.raises(ConfigError, match=r"'mine' must return one number per token, \(3, 3\)"):
        bind_estimator(mine, {})(FLAT, FLAT["rows"])
