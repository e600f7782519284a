"""What holds for every policy loss, and how they are found."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.aggregation import LOSS_AGG_MODES, Denominators, agg_loss
from lockstep.algorithms.masked import zero_outside
from lockstep.algorithms.policy_losses import POLICY_LOSSES, get_policy_loss, vanilla
from lockstep.errors import ConfigError

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
WHOLE_ROW = ("geo_mean",)
"""Losses whose tokens carry the gradient of their whole row: they equal -A log_prob only where A is one number a row."""


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("clip", [CLIP, CLIP | {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0}], ids=["clip", "no room"])
@settings(max_examples=30, deadline=None)
@given(data=st.data(), mode=st.sampled_from(LOSS_AGG_MODES))
def test_at_ratio_one_the_gradient_is_that_of_the_plain_policy_gradient(name, clip, data, mode, masks, numbers):
    mask = data.draw(masks)
    new, advantages = data.draw(numbers(mask)), data.draw(numbers(mask))
    if name in WHOLE_ROW:
        advantages = torch.linspace(-1, 1, len(mask), dtype=torch.float64)[:, None].expand(mask.shape)
    denominators = Denominators.of(mask)

    def gradient(loss_of):
        log_prob = new.clone().requires_grad_()
        agg_loss(loss_of(log_prob), mask, mode, denominators, loss_scale_factor=5.0).backward()
        return log_prob.grad

    actual = gradient(
        lambda x: get_policy_loss(name)(old_log_prob=new, log_prob=x, advantages=advantages, response_mask=mask, **clip)[0]
    )
    expected = gradient(lambda x: -zero_outside(advantages, mask) * zero_outside(x, mask))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_loss_has_the_same_metrics_and_only_vanilla_a_dual_clip(name, data, masks, numbers):
    mask = data.draw(masks)
    old, new, advantages = (data.draw(numbers(mask)) for _ in range(3))
    inputs = {"old_log_prob": old, "log_prob": new, "advantages": advantages, "response_mask": mask, **CLIP}
    _, metrics = get_policy_loss(name)(**inputs)
    assert list(metrics) == ["pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"]
    assert metrics["ppo_kl"].equal(vanilla(**inputs)[1]["ppo_kl"])
    assert name == "vanilla" or not metrics["pg_clipfrac_lower"].any()
    assert not torch.stack(list(metrics.values()))[:, ~mask].any()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_nan_under_the_mask_shows_in_the_loss_of_its_row_only(name):
    ones, new = torch.ones(2, 2), torch.tensor([[1.0, math.nan], [1.0, 1.0]])
    loss, _ = get_policy_loss(name)(old_log_prob=ones, log_prob=new, advantages=ones, response_mask=ones, **CLIP)
    assert loss.isnan().any(dim=1).tolist() == [True, False]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_huge_ratios_keep_the_loss_and_its_gradient_finite_in_float32(name):
    new = torch.tensor([[900.0, -900.0], [900.0, 900.0], [-900.0, -900.0]], requires_grad=True)
    for sign in (1.0, -1.0):
        inputs = {"old_log_prob": torch.zeros(3, 2), "advantages": torch.full((3, 2), sign), "response_mask": torch.ones(3, 2)}
        loss, _ = get_policy_loss(name)(log_prob=new, **inputs, **CLIP)
        loss.sum().backward()
        assert loss.isfinite().all()
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"gpg"}))
@pytest.mark.parametrize("wrong", [{"clip_ratio_low": -0.1}, {"clip_ratio_high": math.nan}])
def test_clip_ranges_that_cannot_work_are_refused_with_the_name_of_the_loss(name, wrong):
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match=f"{name}.*{next(iter(wrong))}"):
        get_policy_loss(name)(old_log_prob=one, log_prob=one, advantages=one, response_mask=one, **(CLIP | wrong))


def test_a_loss_is_found_by_name_and_an_unknown_one_answered_with_the_nearest():
    assert get_policy_loss("vanilla") is vanilla
    with pytest.raises(ConfigError, match="'vanila'; did you mean 'vanilla'"):
        get_policy_loss("vanila")
