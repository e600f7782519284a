"""What holds for every policy loss, and how they are found."""

import math
from unittest.mock import patch

import pytest
import torch
from helpers.flat import aggregate, count, policy_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms import policy_losses as module
from lockstep.algorithms.aggregation import LOSS_AGG_MODES
from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.policy_losses import (
    FLAT_WITHOUT_ADVANTAGE,
    POLICY_LOSSES,
    bind_policy_loss,
    bind_prepare,
    get_policy_loss,
    loss_inputs,
    vanilla,
)
from lockstep.algorithms.rows import Rows
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.errors import ConfigError

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
WHOLE_ROW = ("geo_mean",)
"""Losses whose tokens carry the gradient of their whole row: they equal -A log_prob only where A is one number a row."""


def call(name, **inputs):
    """The loss with the config's other numbers, and no token selected by its covariance."""
    nothing = torch.zeros_like(inputs["response_mask"], dtype=torch.float32)
    return policy_loss(get_policy_loss(name), ActorConfig().loss_parameters | {"cov_selected": nothing} | inputs)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("clip", [CLIP, CLIP | {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0}], ids=["clip", "no room"])
@settings(max_examples=30, deadline=None)
@given(data=st.data(), mode=st.sampled_from(LOSS_AGG_MODES))
def test_at_ratio_one_the_gradient_is_that_of_the_plain_policy_gradient(name, clip, data, mode, masks, numbers):
    mask = data.draw(masks)
    new, advantages = data.draw(numbers(mask)), data.draw(numbers(mask))
    if name in WHOLE_ROW:
        advantages = torch.linspace(-1, 1, len(mask), dtype=torch.float64)[:, None].expand(mask.shape)
    denominators = count(mask)

    def gradient(loss_of):
        log_prob = new.clone().requires_grad_()
        aggregate(loss_of(log_prob), mask, mode, denominators, 5.0).backward()
        return log_prob.grad

    actual = gradient(lambda x: call(name, old_log_prob=new, log_prob=x, advantages=advantages, response_mask=mask, **clip)[0])
    expected = gradient(lambda x: -zero_outside(advantages, mask) * zero_outside(x, mask))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_loss_has_the_same_metrics_and_only_some_a_second_clip(name, data, masks, numbers):
    mask = data.draw(masks)
    old, new, advantages = (data.draw(numbers(mask)) for _ in range(3))
    inputs = {"old_log_prob": old, "log_prob": new, "advantages": advantages, "response_mask": mask, **CLIP}
    _, metrics = call(name, **inputs)
    assert list(metrics) == ["pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"]
    assert metrics["ppo_kl"].equal(vanilla(**inputs)[1]["ppo_kl"])
    assert name in ("vanilla", "dppo_tv", "dppo_kl") or not metrics["pg_clipfrac_lower"].any()
    assert not torch.stack(list(metrics.values()))[:, ~mask].any()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_nan_under_the_mask_shows_in_the_loss_of_its_row_only(name):
    ones, new = torch.ones(2, 2), torch.tensor([[1.0, math.nan], [1.0, 1.0]])
    loss, _ = call(name, old_log_prob=ones, log_prob=new, advantages=ones, response_mask=ones, **CLIP)
    assert loss.isnan().any(dim=1).tolist() == [True, False]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_huge_ratios_keep_the_loss_and_its_gradient_finite_in_float32(name):
    new = torch.tensor([[900.0, -900.0], [900.0, 900.0], [-900.0, -900.0]], requires_grad=True)
    for sign in (1.0, -1.0):
        inputs = {"old_log_prob": torch.zeros(3, 2), "advantages": torch.full((3, 2), sign), "response_mask": torch.ones(3, 2)}
        loss, _ = call(name, log_prob=new, **inputs, **CLIP)
        loss.sum().backward()
        assert loss.isfinite().all()
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if "clip_ratio_low" in loss_inputs(POLICY_LOSSES[name])])
@pytest.mark.parametrize("wrong", [{"clip_ratio_low": -0.1}, {"clip_ratio_high": math.nan}])
def test_clip_ranges_that_cannot_work_are_refused_with_the_name_of_the_loss(name, wrong):
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match=f"{name}.*{next(iter(wrong))}"):
        call(name, old_log_prob=one, log_prob=one, advantages=one, response_mask=one, **(CLIP | wrong))


def test_a_loss_is_found_by_name_and_an_unknown_one_answered_with_the_nearest():
    assert get_policy_loss("vanilla") is vanilla
    with pytest.raises(ConfigError, match="'vanila'; did you mean 'vanilla'"):
        get_policy_loss("vanila")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sapo", {"tau_pos": 0.0}),
        ("sapo", {"tau_neg": math.nan}),
        ("dro", {"dro_beta": 0.0}),
        ("dppo_tv", {"clip_ratio_c": 0.0}),
        ("kl_cov", {"ppo_kl_coef": -1.0}),
    ],
)
def test_parameters_that_cannot_work_are_refused_with_their_key(name, wrong):
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match=f"{name}.*{next(iter(wrong))}"):
        call(name, old_log_prob=one, log_prob=one, advantages=one, response_mask=one, **wrong)


@pytest.fixture
def scratch_registry():
    """Registrations of one test, gone after it."""
    with patch.dict(module.POLICY_LOSSES), patch.dict(module.PREPARATIONS):
        yield


@pytest.mark.usefixtures("scratch_registry")
def test_a_registered_loss_and_its_prepare_get_the_inputs_they_name_and_no_others():
    def count(*, response_mask, power):
        return {"share": response_mask / response_mask.sum() ** power}

    @module.register_policy_loss("probe", prepare=count)
    def probe(*, log_prob, share, sharpness=2.0):
        return log_prob * share * sharpness, {}

    assert get_policy_loss("probe") is probe
    assert loss_inputs(probe) == {"response_mask": True, "power": True, "log_prob": True, "share": True, "sharpness": False}
    rows = Rows(torch.tensor([2]))
    columns = bind_prepare(probe, {"power": 1})({"response_mask": torch.ones(2), "advantages": None}, rows)
    assert columns["share"].tolist() == [0.5, 0.5]
    loss, _ = bind_policy_loss(probe, {"sharpness": 4.0})({"log_prob": torch.tensor([1.0, 3.0]), **columns}, rows)
    assert loss.tolist() == [2.0, 6.0]
    with pytest.raises(ConfigError, match=r"the prepare of policy loss 'probe' needs power.*loss_kwargs"):
        bind_prepare(probe, {})({"response_mask": torch.ones(2)}, rows)


@pytest.mark.usefixtures("scratch_registry")
def test_a_loss_whose_arguments_have_no_names_is_refused_when_registered():
    with pytest.raises(ConfigError, match=r"'\*blocks'.*given by name"):
        module.register_policy_loss("nameless")(lambda *blocks: (blocks[0], {}))
    assert "nameless" not in module.POLICY_LOSSES
    assert bind_prepare(vanilla, {}) is None


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_row_without_advantage_has_no_gradient_in_the_losses_that_say_so(name):
    generator = torch.Generator().manual_seed(0)
    log_prob = torch.randn(3, 5, generator=generator).requires_grad_()
    inputs = {
        "old_log_prob": torch.randn(3, 5, generator=generator),
        "log_prob": log_prob,
        "advantages": torch.tensor([[0.0], [1.5], [-0.7]]).expand(3, 5),
        "response_mask": torch.ones(3, 5, dtype=torch.bool),
        "cov_selected": torch.ones(3, 5),
    }
    loss, _ = policy_loss(get_policy_loss(name), ActorConfig().loss_parameters | inputs)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    assert (gradient[0] == 0).all() == (POLICY_LOSSES[name] in FLAT_WITHOUT_ADVANTAGE)
    if name != "clip_cov":  # which leaves the selected tokens out
        assert (gradient[1:] != 0).any()
