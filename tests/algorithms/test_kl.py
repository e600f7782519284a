import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.kl import (
    KL_KINDS,
    AdaptiveKLController,
    FixedKLController,
    absolute,
    kl_penalty,
    make_kl_controller,
    reward_penalty,
)
from lockstep.errors import ConfigError, NumericalError

PROPERTY = settings(max_examples=30, deadline=None)

logprobs = st.lists(st.floats(-60, 0), min_size=1, max_size=8)


def slow_kl(logprob, ref_logprob, kind):
    d = logprob - ref_logprob
    x = min(max(-d, -20.0), 20.0)
    k1, k2, k3 = d, d * d / 2, min(math.exp(x) - x - 1, 10.0)
    return {"kl": k1, "k1": k1, "abs": abs(d), "mse": k2, "k2": k2, "low_var_kl": k3, "k3": k3}[kind.removesuffix("+")]


def slow_gradient(logprob, ref_logprob, kind):
    d = logprob - ref_logprob
    k3_is_clamped = abs(d) > 20 or math.exp(-d) + d - 1 > 10
    k1, abs_, k2, k3 = 1.0, math.copysign(min(max(abs(d) / 1e-4 - 1, 0.0), 1.0), d), d, 0.0 if k3_is_clamped else 1 - math.exp(-d)
    by_kind = {"kl": k1, "k1": k1, "abs": abs_, "mse": k2, "k2": k2, "low_var_kl": k3, "k3": k3}
    return k2 if kind.endswith("+") else by_kind[kind]


@pytest.mark.parametrize("kind", KL_KINDS)
@PROPERTY
@given(new=logprobs, data=st.data())
def test_each_kind_equals_its_formula_in_value_and_gradient(kind, new, data):
    ref = data.draw(st.lists(st.floats(-60, 0), min_size=len(new), max_size=len(new)))
    logprob = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    value = kl_penalty(logprob, torch.tensor(ref, dtype=torch.float64), kind)
    value.sum().backward()
    pairs = list(zip(new, ref, strict=True))
    assert value.tolist() == pytest.approx([slow_kl(a, b, kind) for a, b in pairs], rel=1e-12, abs=1e-12)
    assert logprob.grad.tolist() == pytest.approx([slow_gradient(a, b, kind) for a, b in pairs], rel=1e-12, abs=1e-12)


@PROPERTY
@given(seed=st.integers(0, 2**32))
def test_k1_and_k3_average_to_the_kl_and_k2_to_its_gradient(seed):
    """Over every outcome of a small categorical policy, not over samples of it: the averages are exact."""
    generator = torch.Generator().manual_seed(seed)
    # A quarter keeps the log-ratios below 2.5, where k3 is not clamped yet.
    logits, ref_logits = 0.25 * torch.randn(2, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy, ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    weight = policy.exp().detach()
    kl = torch.nn.functional.kl_div(ref, policy, log_target=True, reduction="sum")
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    for kind in ("k1", "k3"):
        assert (weight * kl_penalty(policy, ref, kind)).sum().item() == pytest.approx(kl.item(), rel=1e-11)
    for kind in ("k2", "k1+", "k3+"):
        (gradient,) = torch.autograd.grad((weight * kl_penalty(policy, ref, kind)).sum(), logits, retain_graph=True)
        torch.testing.assert_close(gradient, kl_gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["abs", "k2", "k3"])
@PROPERTY
@given(a=st.floats(-60, 0, width=32), b=st.floats(-60, 0, width=32))
def test_a_distance_is_never_negative_and_zero_between_equals(kind, a, b):
    a, b = torch.tensor([a]), torch.tensor([b])
    assert kl_penalty(a, b, kind) >= 0
    assert kl_penalty(a, a, kind) == 0


def test_k3_keeps_its_digits_where_the_policies_nearly_agree():
    x = torch.tensor([1e-3])
    assert kl_penalty(torch.zeros(1), x, "k3").item() == pytest.approx(5.001667e-7, rel=1e-3)


@pytest.mark.parametrize("kind", ["k4", "full", "k1++", ""])
def test_an_unknown_kind_names_the_known_ones(kind):
    with pytest.raises(ConfigError, match=r"Known: kl, k1, .*k3\+"):
        kl_penalty(torch.zeros(1), torch.zeros(1), kind)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_the_reward_loses_what_differs_by_more_than_rounding_under_the_mask(kind):
    ref, mask = torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([1, 1, 0, 1])
    rounding = torch.tensor([1e-6, -2e-5, math.nan, 9e-5])
    assert reward_penalty(ref + rounding, ref, mask, kind).tolist() == [0.0] * 4
    moved = ref + torch.tensor([1e-6, -2e-5, math.nan, 1.1e-4])
    expected = kl_penalty(moved, ref, kind).tolist()
    assert reward_penalty(moved, ref, mask, kind).tolist() == [expected[0], expected[1], 0.0, expected[3]]
    assert reward_penalty(ref + rounding, ref, torch.ones(4), kind)[2].isnan()
    assert reward_penalty(ref + rounding, ref, torch.zeros(4), kind).tolist() == [0.0] * 4


def test_a_fixed_weight_stays():
    controller = make_kl_controller("fixed", kl_coef=0.05, target_kl=0.1, horizon=100)
    controller.update(current_kl=10.0, n_steps=50)
    controller.load_state_dict(controller.state_dict())
    assert isinstance(controller, FixedKLController)
    assert controller.value == 0.05


@pytest.mark.parametrize(
    ("current_kl", "n_steps", "expected"),
    [
        (12.0, 256, 0.201024),  # error +1 clipped to +0.2: 0.2 * (1 + 0.2 * 0.0256)
        (0.0, 256, 0.198976),  # error -1 clipped to -0.2
        (-3.0, 256, 0.198976),  # an estimate of the KL may be negative
        (5.4, 100, 0.1998),  # error -0.1 as it is: 0.2 * (1 - 0.1 * 0.01)
        (6.0, 100, 0.2),
    ],
)
def test_an_adaptive_weight_follows_the_kl_by_hand(current_kl, n_steps, expected):
    controller = make_kl_controller("adaptive", kl_coef=0.2, target_kl=6.0, horizon=10_000)
    controller.update(current_kl, n_steps)
    assert controller.value == pytest.approx(expected, rel=1e-12)


def test_an_adaptive_weight_resumes_where_it_was():
    first, second = (AdaptiveKLController(0.2, target_kl=6.0, horizon=1000) for _ in range(2))
    first.update(9.0, 64)
    second.load_state_dict(first.state_dict())
    assert second.value == first.value != 0.2


def test_an_adaptive_weight_refuses_a_state_that_has_none():
    with pytest.raises(ConfigError, match=r"kl_ctrl\.type=fixed"):
        AdaptiveKLController(0.2, target_kl=6.0, horizon=1000).load_state_dict(FixedKLController(0.1).state_dict())


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_does_not_become_a_weight(kl):
    controller = AdaptiveKLController(0.2, target_kl=6.0, horizon=1000)
    with pytest.raises(NumericalError):
        controller.update(kl, 10)
    assert controller.value == 0.2


def test_a_horizon_that_could_turn_the_weight_negative_is_refused():
    controller = AdaptiveKLController(0.2, target_kl=6.0, horizon=100)
    controller.update(0.0, 499)
    assert controller.value > 0
    with pytest.raises(ConfigError, match="set horizon above 100"):
        controller.update(6.0, 500)


@pytest.mark.parametrize(("target_kl", "horizon"), [(0.0, 100), (0.1, 0)])
def test_an_adaptive_weight_needs_a_target_and_a_horizon(target_kl, horizon):
    with pytest.raises(ConfigError, match="target_kl and horizon above 0"):
        make_kl_controller("adaptive", 0.1, target_kl, horizon)


def test_an_unknown_controller_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'adaptive'"):
        make_kl_controller("adaptiv", 0.1, 0.1, 100)


def test_the_gradient_of_an_absolute_value_grows_from_rounding_without_a_jump():
    x = torch.linspace(-4e-4, 4e-4, 8001, dtype=torch.float64, requires_grad=True)
    value = absolute(x)
    value.sum().backward()
    assert torch.equal(value.detach(), x.detach().abs())
    assert (x.grad.diff().abs() < 1.1e-3).all()
    assert (x.grad[x.detach().abs() < 1e-4] == 0).all()
    far = x.detach().abs() > 2e-4
    assert torch.equal(x.grad[far], x.detach()[far].sign())
