import math

import pytest
import torch
from helpers.flat import policy_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.policy_losses.clipped import vanilla
from lockstep.algorithms.policy_losses.per_token import cispo, dro, gpg, sapo
from lockstep.errors import ConfigError

PROPERTY = settings(max_examples=50, deadline=None)
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
TAU_POS, TAU_NEG, BETA = 0.8, 1.5, 0.25


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


def slow_cispo(old, new, advantage, low, high, c):
    x = min(max(new - old, -20.0), 20.0)
    weight = min(max(math.exp(x), 1 - low), 1 + high)
    metrics = {"pg_clipfrac": float(not 1 - low <= math.exp(x) <= 1 + high), "pg_clipfrac_lower": 0.0, "ppo_kl": -x}
    return -weight * advantage * new, -weight * advantage, metrics


def slow_gpg(old, new, advantage, low, high, c):
    kl = -min(max(new - old, -20.0), 20.0)
    return -advantage * new, -advantage, {"pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0, "ppo_kl": kl}


def slow_sapo(old, new, advantage, low, high, c):
    x = min(max(new - old, -20.0), 20.0)
    tau = TAU_POS if advantage > 0 else TAU_NEG
    # 1 / (1 + exp(-z)) in the form that does not overflow.
    z = tau * (math.exp(x) - 1)
    gate = 1 / (1 + math.exp(-z)) if z > -700 else 0.0
    derivative = -advantage * 4 * gate * (1 - gate) * math.exp(x) if abs(new - old) <= 20 else 0.0
    return -advantage * gate * 4 / tau, derivative, {"pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0, "ppo_kl": -x}


def slow_dro(old, new, advantage, low, high, c):
    pull = new - old
    metrics = {"pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0, "ppo_kl": -min(max(pull, -20.0), 20.0)}
    return -(advantage * new - BETA / 2 * pull**2), -advantage + BETA * pull, metrics


@pytest.mark.parametrize(
    ("loss_fn", "slow"),
    [(vanilla, slow_vanilla), (cispo, slow_cispo), (gpg, slow_gpg), (sapo, slow_sapo), (dro, slow_dro)],
)
@PROPERTY
@given(data=st.data())
def test_loss_gradient_and_metrics_equal_the_formula(loss_fn, slow, data, masks, numbers):
    mask = data.draw(masks)
    old, new, advantages = (data.draw(numbers(mask)) for _ in range(3))
    new.requires_grad_()
    inputs = {"old_log_prob": old, "log_prob": new, "advantages": advantages, "response_mask": mask}
    parameters = CLIP | {"tau_pos": TAU_POS, "tau_neg": TAU_NEG, "dro_beta": BETA}
    loss, metrics = policy_loss(loss_fn, inputs | parameters)
    loss.sum().backward()

    expected = {name: torch.zeros_like(old) for name in ("loss", "gradient", *metrics)}
    for at in mask.nonzero().tolist():
        at = tuple(at)
        values, derivative, per_token = slow(old[at].item(), new[at].item(), advantages[at].item(), *CLIP.values())
        for name, number in {"loss": values, "gradient": derivative, **per_token}.items():
            expected[name][at] = number
    actual = {"loss": loss.detach(), "gradient": new.grad, **metrics}
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_cispo_keeps_the_gradient_of_a_token_that_vanilla_clips():
    new = torch.tensor([[1.0]], requires_grad=True)
    one = torch.ones(1, 1)
    inputs = {"old_log_prob": 0 * one, "log_prob": new, "advantages": one, "response_mask": one}
    (clipped,) = torch.autograd.grad(vanilla(**inputs, **CLIP)[0].sum(), new)
    (kept,) = torch.autograd.grad(cispo(**inputs, clip_ratio_low=0.2, clip_ratio_high=0.3)[0].sum(), new)
    assert (clipped.item(), kept.item()) == (0.0, pytest.approx(-1.3))


@pytest.mark.parametrize("wrong", [{"clip_ratio_c": 1.0}, {"clip_ratio_c": math.nan}])
def test_a_dual_clip_that_cannot_work_is_refused(wrong):
    one = torch.ones(1, 1)
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        vanilla(old_log_prob=one, log_prob=one, advantages=one, response_mask=one, **(CLIP | wrong))


def test_sapos_gradient_fades_on_both_sides_of_ratio_one():
    new = torch.linspace(-2, 2, 9, dtype=torch.float64)[None].requires_grad_()
    inputs = {"old_log_prob": torch.zeros(1, 9), "advantages": torch.ones(1, 9), "response_mask": torch.ones(1, 9)}
    sapo(log_prob=new, **inputs, tau_pos=4.0, tau_neg=4.0)[0].sum().backward()
    size = new.grad.abs().flatten() / new.detach().exp().flatten()  # by the ratio
    assert size.argmax() == 4
    assert (size[4:].diff() < 0).all()
    assert (size[:5].diff() > 0).all()
