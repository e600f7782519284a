import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.aggregation import Denominators, agg_loss
from lockstep.algorithms.policy_losses import get_policy_loss, vanilla
from lockstep.errors import ConfigError

PROPERTY = settings(max_examples=50, deadline=None)
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}


def slow_vanilla(old, new, advantage, low, high, c):
    """Loss, its derivative by `new`, and the metrics of one token."""
    x = min(max(new - old, -20.0), 20.0)
    rho = math.exp(x)
    derivative = -advantage * rho if abs(new - old) <= 20 else 0.0
    loss, clipped, bounded = -advantage * rho, 0.0, 0.0
    at_bound = -advantage * min(max(rho, 1 - low), 1 + high)
    if at_bound > loss:
        loss, derivative, clipped = at_bound, 0.0, 1.0
    if advantage < 0 and loss > -advantage * c:
        loss, derivative, bounded = -advantage * c, 0.0, 1.0
    return loss, derivative, {"pg_clipfrac": clipped, "pg_clipfrac_lower": bounded, "ppo_kl": -x}


@PROPERTY
@given(data=st.data())
def test_vanilla_loss_gradient_and_metrics_equal_the_formula(data, masks, numbers):
    mask = data.draw(masks)
    old, new, advantages = (data.draw(numbers(mask)) for _ in range(3))
    new.requires_grad_()
    loss, metrics = vanilla(old_log_prob=old, log_prob=new, advantages=advantages, response_mask=mask, **CLIP)
    loss.sum().backward()

    expected = {name: torch.zeros_like(old) for name in ("loss", "gradient", *metrics)}
    for at in mask.nonzero().tolist():
        at = tuple(at)
        values, derivative, per_token = slow_vanilla(old[at].item(), new[at].item(), advantages[at].item(), *CLIP.values())
        for name, number in {"loss": values, "gradient": derivative, **per_token}.items():
            expected[name][at] = number
    actual = {"loss": loss.detach(), "gradient": new.grad, **metrics}
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.3), (0.0, 0.0)])
@PROPERTY
@given(data=st.data())
def test_at_ratio_one_the_gradient_is_the_advantage_over_the_denominator(low, high, data, masks, numbers):
    mask = data.draw(masks)
    new, advantages = data.draw(numbers(mask)), data.draw(numbers(mask))
    new.requires_grad_()
    denominators = Denominators.of(mask)
    loss, _ = vanilla(
        old_log_prob=new.detach(),
        log_prob=new,
        advantages=advantages,
        response_mask=mask,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=3.0,
    )
    agg_loss(loss, mask, "token-mean", denominators).backward()
    expected = torch.where(mask, -advantages / max(denominators.tokens, 1), 0)
    torch.testing.assert_close(new.grad, expected, rtol=1e-12, atol=0)


def test_a_number_that_is_not_finite_under_the_mask_shows_in_the_loss():
    ones = torch.ones(1, 2)
    loss, _ = vanilla(old_log_prob=ones, log_prob=torch.tensor([[1.0, math.nan]]), advantages=ones, response_mask=ones, **CLIP)
    assert loss.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("wrong", [{"clip_ratio_c": 1.0}, {"clip_ratio_low": -0.1}, {"clip_ratio_high": math.nan}])
def test_clip_ranges_that_cannot_work_are_refused(wrong):
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        vanilla(old_log_prob=one, log_prob=one, advantages=one, response_mask=one, **(CLIP | wrong))


def test_a_loss_is_found_by_name_and_an_unknown_one_answered_with_the_nearest():
    assert get_policy_loss("vanilla") is vanilla
    with pytest.raises(ConfigError, match="'vanila'; did you mean 'vanilla'"):
        get_policy_loss("vanila")
