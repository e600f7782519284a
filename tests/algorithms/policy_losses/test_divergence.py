import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.policy_losses.divergence import dppo_kl, dppo_tv

LOW, HIGH, C = 0.05, 0.1, 3.0


def is_inside_tv(p, p_old, advantage):
    return p - p_old <= HIGH if advantage > 0 else p - p_old >= -LOW


def is_inside_kl(p, p_old, advantage):
    kl = p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
    return kl <= HIGH or p <= p_old if advantage > 0 else kl <= LOW or p >= p_old


@pytest.mark.parametrize(("loss_fn", "is_inside"), [(dppo_tv, is_inside_tv), (dppo_kl, is_inside_kl)])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_loss_gradient_and_metrics_equal_the_formula(loss_fn, is_inside, data, masks, numbers):
    mask = data.draw(masks)
    old, new = (-data.draw(numbers(mask)).abs() - 1e-3 for _ in range(2))
    advantages = data.draw(numbers(mask))
    new.requires_grad_()
    loss, metrics = loss_fn(
        old_log_prob=old,
        log_prob=new,
        advantages=advantages,
        response_mask=mask,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=C,
    )
    loss.sum().backward()

    expected = {name: torch.zeros_like(old) for name in ("loss", "gradient", *metrics)}
    for at in map(tuple, mask.nonzero().tolist()):
        o, n, a = old[at].item(), new[at].item(), advantages[at].item()
        x = min(max(n - o, -20.0), 20.0)
        inside = is_inside(math.exp(n), math.exp(o), a)
        weight = min(math.exp(x), C) * inside
        values = {
            "loss": -a * weight * n,
            "gradient": -a * weight,
            "pg_clipfrac": float(not inside),
            "pg_clipfrac_lower": float(inside and math.exp(x) > C),
            "ppo_kl": -x,
        }
        for name, number in values.items():
            expected[name][at] = number
    actual = {"loss": loss.detach(), "gradient": new.grad, **metrics}
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss_fn", [dppo_tv, dppo_kl])
def test_a_rare_token_may_double_while_a_likely_one_may_not(loss_fn):
    old = torch.log(torch.tensor([[0.001, 0.4]], dtype=torch.float64))
    new = torch.log(torch.tensor([[0.002, 0.8]], dtype=torch.float64)).requires_grad_()
    ones = torch.ones(1, 2)
    bounds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 20.0}
    _, metrics = loss_fn(old_log_prob=old, log_prob=new, advantages=ones, response_mask=ones, **bounds)
    assert metrics["pg_clipfrac"].tolist() == [[0.0, 1.0]]
