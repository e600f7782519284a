import functools
import math
import statistics

import torch
from helpers.flat import aggregate, count, on_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.policy_losses.clipped import vanilla
from lockstep.algorithms.policy_losses.per_sequence import geo_mean, gspo

PROPERTY = settings(max_examples=50, deadline=None)
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
LOW, HIGH = 0.2, 0.3


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def drawn(data, masks, numbers):
    """(old, new, advantages, mask), with policies near each other or far apart."""
    mask = data.draw(masks)
    old, step, advantages = (data.draw(numbers(mask)) for _ in range(3))
    return old, (old + step).requires_grad_(), advantages, mask


def rows_of(mask):
    """(row, its selected positions) of every row that has one."""
    return [(i, mask[i].nonzero().flatten().tolist()) for i in range(len(mask)) if mask[i].any()]


@PROPERTY
@given(data=st.data())
def test_gspo_clips_the_ratio_of_the_row_and_passes_each_token_its_own_gradient(data, masks, numbers):
    old, new, advantages, mask = drawn(data, masks, numbers)
    loss, metrics = on_tokens(gspo, old_log_prob=old, log_prob=new, advantages=advantages, response_mask=mask, **CLIP)
    loss.sum().backward()

    expected = {name: torch.zeros_like(old) for name in ("loss", "gradient", "pg_clipfrac")}
    for i, at in rows_of(mask):
        x = statistics.fmean(new[i, t].item() - old[i, t].item() for t in at)
        ratio = math.exp(min(x, 10.0))
        bound = min(max(ratio, 1 - LOW), 1 + HIGH)
        for t in at:
            a = advantages[i, t].item()
            clipped = -a * bound > -a * ratio
            expected["loss"][i, t] = -a * (bound if clipped else ratio)
            expected["gradient"][i, t] = 0.0 if clipped or x > 10 else -a * ratio
            expected["pg_clipfrac"][i, t] = float(clipped)
    close({"loss": loss.detach(), "gradient": new.grad, "pg_clipfrac": metrics["pg_clipfrac"]}, expected)


@PROPERTY
@given(data=st.data())
def test_geo_mean_clips_tokens_and_multiplies_the_row_mean_advantage_by_their_geometric_mean(data, masks, numbers):
    old, new, advantages, mask = drawn(data, masks, numbers)
    loss, metrics = on_tokens(geo_mean, old_log_prob=old, log_prob=new, advantages=advantages, response_mask=mask, **CLIP)
    aggregate(loss, mask, "seq-mean-token-mean", Denominators(tokens=1, sequences=1)).backward()

    expected = {name: torch.zeros_like(old) for name in ("loss", "gradient", "pg_clipfrac")}
    for i, at in rows_of(mask):
        a = {t: advantages[i, t].item() for t in at}
        x = {t: new[i, t].item() - old[i, t].item() for t in at}
        y = {t: max(x[t], -LOW) if a[t] < 0 else min(x[t], HIGH) for t in at}
        row = -statistics.fmean(a.values()) * math.exp(statistics.fmean(min(max(v, -20.0), 20.0) for v in y.values()))
        for t in at:
            free = y[t] == x[t] and abs(x[t]) <= 20
            expected["loss"][i, t] = row
            expected["gradient"][i, t] = row / len(at) if free else 0.0
            expected["pg_clipfrac"][i, t] = float(y[t] != x[t])
    close({"loss": loss.detach(), "gradient": new.grad, "pg_clipfrac": metrics["pg_clipfrac"]}, expected)


@PROPERTY
@given(data=st.data())
def test_gspo_with_rows_of_one_token_is_vanilla_without_dual_clip(data, masks, numbers):
    old, new, advantages, mask = drawn(data, masks, numbers)
    mask = mask & (mask.cumsum(dim=1) == 1)
    inputs = {"old_log_prob": old, "advantages": advantages, "response_mask": mask, **CLIP}
    new = (old + (new - old).clamp(-9, 9)).detach()  # beyond 10 gspo clamps, beyond 20 vanilla

    def result(loss_fn):
        log_prob = new.clone().requires_grad_()
        loss, metrics = on_tokens(loss_fn, log_prob=log_prob, **inputs)
        loss.sum().backward()
        return loss.detach(), log_prob.grad, metrics

    close(result(gspo), result(functools.partial(vanilla, clip_ratio_c=math.inf)))


@PROPERTY
@given(data=st.data())
def test_gspos_gradient_is_that_of_the_sequence_objective_when_a_row_has_one_advantage(data, masks, numbers):
    old, new, _, mask = drawn(data, masks, numbers)
    per_row = torch.linspace(-1, 1, len(mask), dtype=torch.float64)
    inputs = {"old_log_prob": old, "advantages": per_row[:, None].expand(mask.shape), "response_mask": mask}
    new = (old + (new - old).clamp(-0.1, 0.1)).detach()  # inside the clip range
    denominators = count(mask)

    log_prob = new.clone().requires_grad_()
    aggregate(on_tokens(gspo, log_prob=log_prob, **inputs, **CLIP)[0], mask, "seq-mean-token-mean", denominators).backward()

    direct = new.clone().requires_grad_()
    difference = torch.where(mask, direct - old, 0)
    ratio = (difference.sum(1) / mask.sum(1).clamp(min=1)).exp()
    (-(per_row * ratio)[mask.any(1)].sum() / max(denominators.sequences, 1)).backward()
    close(log_prob.grad, torch.where(mask, direct.grad, 0))


def test_geo_means_average_over_rows_is_the_papers_whatever_their_lengths():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    new = torch.log(torch.tensor([[1.1, 1.2, 0.9], [0.9, 7.0, 7.0]], dtype=torch.float64))
    advantages = torch.tensor([[2.0] * 3, [-1.0] * 3], dtype=torch.float64)
    loss, _ = on_tokens(
        geo_mean, old_log_prob=torch.zeros_like(new), log_prob=new, advantages=advantages, response_mask=mask, **CLIP
    )
    total = aggregate(loss, mask, "seq-mean-token-mean", count(mask))
    assert math.isclose(total.item(), (-2 * (1.1 * 1.2 * 0.9) ** (1 / 3) + 0.9) / 2, rel_tol=1e-12)
