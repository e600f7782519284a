import pytest
import torch
from helpers.flat import on_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.policy_losses.clipped import vanilla
from lockstep.algorithms.policy_losses.covariance import choose_clip_cov, choose_kl_cov, clip_cov, kl_cov
from lockstep.errors import ConfigError

PROPERTY = settings(max_examples=50, deadline=None)
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}


def slow_covariances(log_prob, advantages, mask):
    """{(i, t): covariance} of the selected tokens."""
    at = [tuple(place) for place in mask.nonzero().tolist()]
    a_mean = sum(advantages[p].item() for p in at) / max(len(at), 1)
    l_mean = sum(log_prob[p].item() for p in at) / max(len(at), 1)
    return {p: (advantages[p].item() - a_mean) * (log_prob[p].item() - l_mean) for p in at}


def drawn(data, masks, numbers):
    mask = data.draw(masks)
    return data.draw(numbers(mask)), data.draw(numbers(mask)), mask, torch.arange(len(mask)) * 3 + 1


@PROPERTY
@given(data=st.data(), ratio=st.sampled_from([0.01, 0.3, 1.0]))
def test_kl_cov_chooses_the_tokens_of_the_highest_covariance(data, ratio, masks, numbers):
    old, advantages, mask, keys = drawn(data, masks, numbers)
    inputs = {"old_log_prob": old, "advantages": advantages, "response_mask": mask, "row_keys": keys}
    chosen = on_tokens(choose_kl_cov, **inputs, kl_cov_ratio=ratio)["cov_selected"]
    slow = slow_covariances(old, advantages, mask)
    count = min(max(int(ratio * len(slow)), 1), len(slow))
    assert int(chosen.sum()) == count
    picked = {tuple(p) for p in chosen.nonzero().tolist()}
    assert picked <= set(slow)
    if picked and len(picked) < len(slow):
        assert min(slow[p] for p in picked) >= max(slow[p] for p in slow if p not in picked) - 1e-9


@PROPERTY
@given(data=st.data(), ratio=st.sampled_from([0.01, 0.3, 1.0]))
def test_clip_cov_draws_among_the_tokens_between_the_bounds(data, ratio, masks, numbers):
    old, advantages, mask, keys = drawn(data, masks, numbers)
    inputs = {"old_log_prob": old, "advantages": advantages, "response_mask": mask, "row_keys": keys, "clip_cov_ratio": ratio}
    low, high = -0.05, 2.0
    chosen = on_tokens(choose_clip_cov, **inputs, clip_cov_lb=low, clip_cov_ub=high)["cov_selected"]
    between = {p for p, value in slow_covariances(old, advantages, mask).items() if low < value < high}
    assert {tuple(p) for p in chosen.nonzero().tolist()} <= between
    assert int(chosen.sum()) == min(max(int(ratio * int(mask.sum())), 1), len(between))
    barred = on_tokens(choose_clip_cov, **inputs, clip_cov_lb=low, clip_cov_ub=high, eligible=torch.zeros_like(mask))[
        "cov_selected"
    ]
    assert not barred.any()


def test_the_draw_is_fair_and_depends_on_the_keys():
    # Two tokens of covariance 1/4 each in every row: the first is chosen about as often as the second.
    old, advantages, mask = torch.tensor([[1.0, 1, 0]]), torch.tensor([[1.0, 1, 0]]), torch.ones(1, 3)
    firsts = sum(
        on_tokens(
            choose_clip_cov, old_log_prob=old, advantages=advantages, response_mask=mask, row_keys=torch.tensor([key]),
            clip_cov_ratio=0.01, clip_cov_lb=0.1, clip_cov_ub=0.2,
        )["cov_selected"][0, 0].item()
        for key in range(200)
    )  # fmt: skip
    assert 70 <= firsts <= 130


@PROPERTY
@given(data=st.data())
def test_selected_tokens_have_no_loss_in_clip_cov_and_a_penalty_in_kl_cov(data, masks, numbers):
    mask = data.draw(masks)
    old, step, advantages = (data.draw(numbers(mask)) for _ in range(3))
    selected = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    inputs = {"old_log_prob": old, "advantages": advantages, "response_mask": mask}

    def result(loss_fn, **more):
        log_prob = (old + step.clamp(-19, 19)).requires_grad_()
        loss, metrics = loss_fn(log_prob=log_prob, **inputs, **more)
        loss.sum().backward()
        return loss.detach(), log_prob.grad, metrics

    clipped, clipped_gradient, metrics = result(clip_cov, **CLIP, cov_selected=selected.float())
    plain, plain_gradient, plain_metrics = result(vanilla, **CLIP, clip_ratio_c=1e12)
    torch.testing.assert_close((clipped, clipped_gradient), (plain * ~selected, plain_gradient * ~selected))
    assert metrics["pg_clipfrac"].equal(torch.maximum(plain_metrics["pg_clipfrac"], (selected & mask).double()))

    penalised, gradient, _ = result(kl_cov, ppo_kl_coef=0.5, cov_selected=selected.float())
    x = torch.where(mask, step.clamp(-19, 19), 0)
    a = torch.where(mask, advantages, 0)
    torch.testing.assert_close(penalised, -a * x.exp() * mask + 0.5 * selected * x.abs(), rtol=1e-10, atol=1e-10)
    direction = x.sign() * (x.abs() / 1e-4 - 1).clamp(0, 1)
    torch.testing.assert_close(gradient, -a * x.exp() * mask + 0.5 * selected * direction, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "wrong",
    [{"clip_cov_ratio": 0.0}, {"clip_cov_ratio": 1.5}, {"clip_cov_lb": 2.0, "clip_cov_ub": 2.0}],
    ids=["none", "all", "bounds"],
)
def test_a_choice_that_cannot_work_is_refused(wrong):
    one = torch.ones(1, 1)
    inputs = {"old_log_prob": one, "advantages": one, "response_mask": one, "row_keys": torch.zeros(1, dtype=torch.int64)}
    with pytest.raises(ConfigError, match=f"clip_cov.*{next(iter(wrong))}"):
        on_tokens(choose_clip_cov, **inputs, **({"clip_cov_ratio": 0.1, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0} | wrong))
    with pytest.raises(ConfigError, match="kl_cov_ratio"):
        on_tokens(choose_kl_cov, **inputs, kl_cov_ratio=0.0)
