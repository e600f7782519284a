"""What must hold for every estimator and every loss, also for those added later: batching never changes the maths.

Right padding, the order of the rows, rows without a token, and garbage under the mask change no result; the parts of a
split mini-batch add up to the whole, in value and in gradient. A new estimator or policy loss is covered as soon as it
is registered.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.advantages import ADV_ESTIMATORS, compute_advantage
from lockstep.algorithms.aggregation import LOSS_AGG_MODES, Denominators, agg_loss
from lockstep.algorithms.kl import kl_penalty
from lockstep.algorithms.masked import zero_outside
from lockstep.algorithms.policy_losses import POLICY_LOSSES
from lockstep.algorithms.value_losses import clipped_value_loss

PROPERTY = settings(max_examples=25, deadline=None)


def policy_loss(name):
    def loss(new, old, advantages, mask):
        clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
        return POLICY_LOSSES[name](old_log_prob=old, log_prob=new, advantages=advantages, response_mask=mask, **clip)

    return loss


def value_loss(new, old, returns, mask):
    return clipped_value_loss(vpreds=new, values=old, returns=returns, response_mask=mask, cliprange_value=0.5)


def kl_loss(kind):
    def loss(new, ref, _, mask):
        return kl_penalty(zero_outside(new, mask), zero_outside(ref, mask), kind), {}

    return loss


LOSSES = {
    **{f"policy-{name}": policy_loss(name) for name in POLICY_LOSSES},
    "value": value_loss,
    **{f"kl-{kind}": kl_loss(kind) for kind in ("k1", "abs", "k2", "k3", "k3+")},
}


def mean_loss(loss, tensors, mask, mode, denominators):
    """Aggregated loss, its gradient by the first tensor, and the metrics."""
    learned = tensors[0].clone().requires_grad_()
    mat, metrics = loss(learned, *tensors[1:], mask)
    assert not any(metric.requires_grad for metric in metrics.values())
    total = agg_loss(mat, mask, mode, denominators, loss_scale_factor=5.0)
    total.backward()
    return total.detach(), learned.grad, metrics


def widened(x, filler):
    """Two more columns on the right."""
    return torch.cat([x, torch.full((len(x), 2), filler, dtype=x.dtype)], dim=1)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.fixture(params=sorted(LOSSES), scope="module")
def loss(request):
    return LOSSES[request.param]


@PROPERTY
@given(data=st.data(), mode=st.sampled_from(LOSS_AGG_MODES))
def test_a_loss_does_not_depend_on_garbage_padding_or_row_order(data, mode, loss, masks, numbers):
    mask = data.draw(masks)
    tensors = [data.draw(numbers(mask)) for _ in range(3)]
    denominators = Denominators.of(mask)
    cleaned = [zero_outside(x, mask) for x in tensors]
    total, gradient, metrics = mean_loss(loss, cleaned, mask, mode, denominators)
    assert gradient.isfinite().all()

    close(mean_loss(loss, tensors, mask, mode, denominators), (total, gradient, metrics))

    padded = [widened(x, torch.nan) for x in tensors]
    wide_total, wide_gradient, wide_metrics = mean_loss(loss, padded, widened(mask, False), mode, denominators)
    close(wide_total, total)
    close(wide_gradient, widened(gradient, 0.0))
    close(wide_metrics, {name: widened(metric, 0.0) for name, metric in metrics.items()})

    order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
    shuffled = mean_loss(loss, [x[order] for x in tensors], mask[order], mode, denominators)
    close(shuffled, (total, gradient[order], {name: metric[order] for name, metric in metrics.items()}))


@PROPERTY
@given(data=st.data(), mode=st.sampled_from(LOSS_AGG_MODES))
def test_the_parts_of_a_mini_batch_add_up_to_its_loss_and_gradient(data, mode, loss, masks, numbers):
    mask = data.draw(masks)
    tensors = [data.draw(numbers(mask)) for _ in range(3)]
    denominators = Denominators.of(mask)
    total, gradient, metrics = mean_loss(loss, tensors, mask, mode, denominators)
    cut = data.draw(st.integers(0, len(mask)))
    first, second = (
        mean_loss(loss, [x[rows] for x in tensors], mask[rows], mode, denominators) for rows in (slice(cut), slice(cut, None))
    )
    close(first[0] + second[0], total)
    close(torch.cat([first[1], second[1]]), gradient)
    close({name: torch.cat([first[2][name], second[2][name]]) for name in metrics}, metrics)


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATORS))
@PROPERTY
@given(data=st.data(), normalise=st.booleans())
def test_an_advantage_does_not_depend_on_garbage_padding_row_order_or_empty_rows(name, data, normalise, masks, numbers):
    mask = data.draw(masks)
    rewards, values = data.draw(numbers(mask)), data.draw(numbers(mask))
    group = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask))))

    def estimate(rewards, values, mask, group):
        available = {
            "token_level_rewards": rewards,
            "values": values,
            "response_mask": mask,
            "group": group,
            "gamma": 0.9,
            "lam": 0.8,
            "norm_adv_by_std_in_grpo": normalise,
        }
        return compute_advantage(name, available)

    result = estimate(zero_outside(rewards, mask), zero_outside(values, mask), mask, group)
    for x in result:
        assert x.isfinite().all()
        assert not x[~mask].any()

    close(estimate(rewards, values, mask, group), result)

    wide = estimate(widened(rewards, torch.nan), widened(values, torch.nan), widened(mask, False), group)
    close(wide, tuple(widened(x, 0.0) for x in result))

    order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
    close(estimate(rewards[order], values[order], mask[order], group[order]), tuple(x[order] for x in result))

    kept = mask.any(dim=-1)
    close(estimate(rewards[kept], values[kept], mask[kept], group[kept]), tuple(x[kept] for x in result))
