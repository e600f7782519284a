import math
import statistics

import pytest
import torch
from helpers.blocks import Cut
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.mismatch import (
    RS_KINDS,
    Bounds,
    importance_weights,
    kept_tokens,
    log_ratio,
    make_correction,
    mismatch_metrics,
    raw_weights,
    rejection_metrics,
    rejection_statistic,
    weight_metrics,
)
from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError

PROPERTY = settings(max_examples=40, deadline=None)
TRUNCATE, ICEPOP = Bounds(0.0, 2.0), Bounds(0.5, 2.0)


def drawn(data, masks, numbers):
    """(x, mask): log-ratios within 3 under the mask, NaN or inf outside before they are taken."""
    mask = data.draw(masks)
    old = data.draw(numbers(mask))
    return log_ratio(old, old - data.draw(numbers(mask)).clamp(-3, 3), mask), mask


def rows_of(x, mask):
    return {i: [x[i, t].item() for t in mask[i].nonzero().flatten().tolist()] for i in range(len(mask)) if mask[i].any()}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("band", [TRUNCATE, ICEPOP], ids=["truncate", "icepop"])
@PROPERTY
@given(data=st.data(), normalise=st.booleans())
def test_weights_equal_their_formula(level, band, data, normalise, masks, numbers):
    x, mask = drawn(data, masks, numbers)
    expected, units = torch.zeros_like(x), []
    for i, values in rows_of(x, mask).items():
        ratios = [math.exp(v) for v in values]
        if level == "sequence":
            ratios = [math.exp(min(max(math.fsum(values), -20), 20))] * len(values)
        cut = [min(r, 2.0) if band.low == 0 else (r if 0.5 <= r <= 2.0 else 0.0) for r in ratios]
        expected[i][mask[i]] = torch.tensor(cut, dtype=x.dtype)
        units += cut[:1] if level == "sequence" else cut
    if normalise and units and sum(units) > 0:
        expected = expected / statistics.fmean(units)
    cut = Cut(mask)
    actual = importance_weights(cut(x.requires_grad_()), cut(mask), cut.rows, level, band, normalise)
    torch.testing.assert_close(cut.back(actual), expected, rtol=1e-9, atol=1e-12)
    assert not actual.requires_grad


def slow_statistic(kind, i, rows, group):
    """Per row: the statistic, or the list of them for token kinds."""
    place, divergence = kind.rsplit("_", 1)
    value = {"k1": lambda v: v, "k2": lambda v: v * v / 2, "k3": lambda v: math.exp(v) - 1 - v}[divergence]
    numbers = {j: [value(v) for v in values] for j, values in rows.items()}
    if place == "token":
        return numbers[i]
    if place == "group":
        return statistics.fmean(statistics.fmean(numbers[j]) for j in rows if group[j] == group[i])
    return {"seq_sum": math.fsum, "seq_mean": statistics.fmean, "seq_max": max}[place](numbers[i])


@pytest.mark.parametrize("kind", RS_KINDS)
@PROPERTY
@given(data=st.data())
def test_rejection_keeps_what_is_within_the_bounds(kind, data, masks, numbers):
    x, mask = drawn(data, masks, numbers)
    group = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=len(mask), max_size=len(mask))))
    rows = rows_of(x, mask)
    bounds = Bounds(0.7, 1.9)
    expected = torch.zeros_like(mask)
    for i in rows:
        found = slow_statistic(kind, i, rows, group)
        found = torch.tensor(found if isinstance(found, list) else [found] * len(rows[i]), dtype=x.dtype)
        inside = (found.exp() >= 0.7) & (found.exp() <= 1.9) if kind.endswith("k1") else found <= 1.9
        expected[i][mask[i]] = inside
    cut = Cut(mask)
    assert cut.back(kept_tokens(cut(x), cut(mask), cut.rows, kind, bounds, group)).equal(expected)


@PROPERTY
@given(data=st.data())
def test_policies_that_agree_have_weight_one_and_lose_nothing(data, masks, numbers):
    block = data.draw(masks)
    cut = Cut(block)
    old, mask, rows = cut(data.draw(numbers(block))), cut(block), cut.rows
    x = log_ratio(old, old, mask)
    for level in ("token", "sequence"):
        for band in (TRUNCATE, ICEPOP):
            assert importance_weights(x, mask, rows, level, band, normalise=True).equal(mask.double())
    for kind in RS_KINDS:
        assert kept_tokens(x, mask, rows, kind, Bounds(1.0, 1.0), torch.zeros(len(rows))).equal(mask)
    metrics = mismatch_metrics(old, old, mask, rows)
    assert all(value == 0 for name, value in metrics.items() if "diff" in name or "chi2" in name or name.endswith("kl"))
    assert metrics.get("ppl_ratio", 1.0) == 1.0


def test_metrics_by_hand():
    old = torch.log(torch.tensor([0.5, 0.25, 9.0, 0.5], dtype=torch.float64))
    rollout = torch.log(torch.tensor([0.25, 0.5, 9.0, 0.25], dtype=torch.float64))
    rows, mask = Rows(torch.tensor([3, 1])), torch.tensor([1, 1, 0, 1])
    metrics = mismatch_metrics(old, rollout, mask, rows)
    log2 = math.log(2)
    assert metrics == pytest.approx(
        {
            "kl": -log2 / 3,
            "k3_kl": ((2 - 1 - log2) * 2 + (0.5 - 1 + log2)) / 3,
            "training_ppl": (math.sqrt(8) + 2) / 2,
            "training_log_ppl": (1.5 * log2 + log2) / 2,
            "rollout_ppl": (math.sqrt(8) + 4) / 2,
            "rollout_log_ppl": (1.5 * log2 + 2 * log2) / 2,
            "log_ppl_diff": -log2 / 2,
            "log_ppl_abs_diff": log2 / 2,
            "log_ppl_diff_max": 0.0,
            "log_ppl_diff_min": -log2,
            "ppl_ratio": (1 + 0.5) / 2,
            "chi2_token": (4 + 0.25 + 4) / 3 - 1,
            "chi2_seq": (1 + 4) / 2 - 1,
        }
    )
    raw = raw_weights(log_ratio(old, rollout, mask), mask, rows, "token")
    assert weight_metrics(raw, mask, rows, "token", Bounds(0.0, 1.5)) == pytest.approx(
        {
            # The cut weights are 1.5, 0.5 and 1.5; those of the first row have the mean 1.
            "rollout_is_mean": 3.5 / 3,
            "rollout_is_std": math.sqrt(2) / 3,
            "rollout_is_min": 0.5,
            "rollout_is_max": 1.5,
            "rollout_is_seq_mean": 1.25,
            "rollout_is_seq_std": math.sqrt(0.125),
            "rollout_is_seq_max": 1.5,
            "rollout_is_seq_min": 1.0,
            "rollout_is_seq_max_deviation": 0.5,
            "rollout_is_seq_fraction_high": 1 / 2,  # raw: 1.25 and 2
            "rollout_is_seq_fraction_low": 0.0,
            "rollout_is_eff_sample_size": (3.5 / 3) ** 2 / ((1.5**2 * 2 + 0.25) / 3),
            "rollout_is_ratio_fraction_high": 2 / 3,
            "rollout_is_ratio_fraction_low": 1 / 3,
        }
    )
    assert mismatch_metrics(old, rollout, torch.zeros(4), rows) == {}
    assert weight_metrics(raw, torch.zeros(4), rows, "sequence", TRUNCATE) == {}


def test_weights_of_sequences_are_told_before_and_after_the_cut():
    rows, mask = Rows(torch.tensor([2, 1])), torch.ones(3)
    found = weight_metrics(torch.tensor([3.0, 3.0, 0.5]), mask, rows, "sequence", TRUNCATE)
    assert [found[f"rollout_is_{name}"] for name in ("min", "max", "seq_min", "seq_max")] == [0.5, 3.0, 0.5, 2.0]
    assert found["rollout_is_mean"] == pytest.approx(4.5 / 3)


def test_what_a_rejection_looks_at_by_hand():
    x = torch.tensor([0.5, -1.0, 9.0, 0.25], dtype=torch.float64)
    rows, mask = Rows(torch.tensor([3, 1])), torch.tensor([1, 1, 0, 1])
    bounds = Bounds(math.exp(-0.4), math.exp(0.4))
    statistic = rejection_statistic(x, mask, rows, "token_k1")
    # Under k1 the sign is turned: -0.5, 1 and -0.25; cut to the bounds -0.4, 0.4 and -0.25.
    assert rejection_metrics(statistic, mask, rows, "token_k1", bounds) == pytest.approx(
        {
            "rollout_rs_token_k1_mean": 0.25 / 3,
            "rollout_rs_token_k1_std": statistics.pstdev([-0.4, 0.4, -0.25]),
            "rollout_rs_token_k1_max": 1.0,
            "rollout_rs_token_k1_min": -0.5,
            "rollout_rs_token_k1_fraction_high": 1 / 3,
            "rollout_rs_token_k1_fraction_low": 1 / 3,
            "rollout_rs_token_k1_seq_mean": 0.0,
            "rollout_rs_token_k1_seq_std": statistics.stdev([0.25, -0.25]),
            "rollout_rs_token_k1_seq_max": 0.25,
            "rollout_rs_token_k1_seq_min": -0.25,
            "rollout_rs_token_k1_seq_max_deviation": 0.25,
            "rollout_rs_token_k1_seq_fraction_high": 0.0,
            "rollout_rs_token_k1_seq_fraction_low": 0.0,
        }
    )
    of_rows = rejection_metrics(rejection_statistic(x, mask, rows, "seq_max_k2"), mask, rows, "seq_max_k2", Bounds(0.0, 0.1))
    assert (of_rows["rollout_rs_seq_max_k2_max"], of_rows["rollout_rs_seq_max_k2_fraction_high"]) == (0.5, 0.5)
    assert rejection_metrics(statistic, torch.zeros(4), rows, "token_k1", bounds) == {}


def test_the_options_are_read_in_verls_notation():
    correction = make_correction("token", "0.5_5.0", True, "seq_mean_k1, token_k3", "0.8_1.2,3.0")
    assert (correction.level, correction.band, correction.normalise) == ("token", Bounds(0.5, 5.0), True)
    assert correction.rejections == (("seq_mean_k1", Bounds(0.8, 1.2)), ("token_k3", Bounds(0.0, 3.0)))
    one_for_all = make_correction(None, 2.0, False, "token_k1,seq_sum_k1", 4.0)
    assert one_for_all.rejections == (("token_k1", Bounds(0.25, 4.0)), ("seq_sum_k1", Bounds(0.25, 4.0)))
    assert not make_correction(None, 2.0, False, None, None).is_on


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("tokens", 2.0, False, None, None), "rollout_is 'tokens'; did you mean 'token'"),
        (("token", 0.55, False, None, None), "cuts weights below 1.*0.5_5.0"),  # what YAML makes of 0.5_5
        (("token", "a_b", False, None, None), "cannot be read"),
        (("token", "2.0_5.0", False, None, None), "leaves out 1"),
        ((None, 2.0, False, "seq_max_k1", 2.0), "rollout_rs 'seq_max_k1'; did you mean"),
        ((None, 2.0, False, "token_k1", None), "needs algorithm.rollout_correction.rollout_rs_threshold"),
        ((None, 2.0, False, "token_k1,token_k2,token_k3", "2.0,3.0"), "2 thresholds for 3 kinds"),
        ((None, 2.0, False, "token_k1", 0.5), "bounds a ratio"),
        ((None, 2.0, False, "token_k2", "0.5_2.0"), "takes one upper bound"),
        ((None, 2.0, False, "token_k2", -1.0), "positive number"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_correction(*options)


def test_rejection_by_group_needs_groups():
    with pytest.raises(ConfigError, match="group of each row"):
        kept_tokens(torch.zeros(1), torch.ones(1), Rows(torch.tensor([1])), "group_k2", Bounds(0.0, 1.0))
