import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.observability.statistics import wilson_interval
from lockstep.trainer.ppo.validation import validation_metrics


def numbers(*arguments):
    """The metrics without the ends of intervals."""
    return {name: value for name, value in validation_metrics(*arguments).items() if not name.endswith(("/low", "/high"))}


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 5), num_prompts=st.integers(1, 3), data=st.data())
def test_every_number_equals_a_loop_over_prompts_and_choices(n, num_prompts, data):
    rewards = data.draw(st.lists(st.floats(-5, 5), min_size=n * num_prompts, max_size=n * num_prompts))
    groups = [rewards[i : i + n] for i in range(0, len(rewards), n)]
    expected = {f"val-core/s/reward/mean@{n}": statistics.fmean(map(statistics.fmean, groups))}
    if n > 1:
        expected[f"val-aux/s/reward/std@{n}"] = statistics.fmean(statistics.stdev(group) for group in groups)
        for k in {k for k in (2, 4) if k < n} | {n}:
            chosen = [list(itertools.combinations(group, k)) for group in groups]
            expected[f"val-core/s/reward/best@{k}/mean"] = statistics.fmean(statistics.fmean(map(max, c)) for c in chosen)
            expected[f"val-aux/s/reward/worst@{k}/mean"] = statistics.fmean(statistics.fmean(map(min, c)) for c in chosen)
    prompts = [row // n for row in range(len(rewards))]
    assert numbers(["s"] * len(rewards), prompts, {"reward": rewards}) == pytest.approx(expected, abs=1e-9)


def test_sources_are_summarised_apart_each_with_its_own_core_variable():
    metrics = validation_metrics(
        ["math", "code", "math"], [0, 1, 2], {"reward": [1.0, 5.0, 0.0], "acc": [True, None, False], "note": ["a", "b", "c"]}
    )
    assert metrics == {
        "val-core/math/acc/mean@1": 0.5,
        "val-aux/math/acc/mean@1/low": wilson_interval(1, 2)[0],
        "val-aux/math/acc/mean@1/high": wilson_interval(1, 2)[1],
        "val-aux/math/reward/mean@1": 0.5,
        "val-core/code/reward/mean@1": 5.0,
    }


def test_a_variable_that_is_no_number_in_some_row_is_not_summarised():
    for odd in (float("nan"), float("inf"), 10**400, None):
        metrics = validation_metrics(["s", "s"], [0, 1], {"reward": [1.0, 0.0], "acc": [1.0, odd], "length": [1, 2]})
        assert {name.split("/")[2] for name in metrics} == {"reward", "length"}


def test_the_majority_is_the_most_frequent_prediction_and_the_first_of_equals():
    metrics = validation_metrics(
        ["s"] * 6,
        [0, 0, 0, 1, 1, 1],
        {"reward": [0.0, 1.0, 1.0, 0.25, 1.0, 0.0], "pred": ["4", "7", "7", "a", "b", "c"]},
    )
    assert metrics["val-core/s/reward/maj@3/mean"] == pytest.approx((1.0 + 0.25) / 2)
    # Of two, the first where they differ: (4, 7), (4, 7), (7, 7) and (a, b), (a, c), (b, c).
    assert metrics["val-core/s/reward/maj@2/mean"] == pytest.approx((1 / 3 + 1.5 / 3) / 2)


def test_the_majority_of_many_samples_is_drawn_from_the_ways_to_choose_them():
    preds = ["a"] * 20 + ["b"] * 12
    infos = {"reward": [float(pred == "a") for pred in preds], "pred": preds}
    metrics = validation_metrics(["s"] * 32, [0] * 32, infos)
    assert metrics["val-core/s/reward/maj@32/mean"] == 1.0
    # "a" wins 8 of 32 with hypergeometric odds; a tie goes to "a", which comes first.
    odds = sum(math.comb(20, i) * math.comb(12, 8 - i) for i in range(4, 9)) / math.comb(32, 8)
    assert metrics["val-core/s/reward/maj@8/mean"] == pytest.approx(odds, abs=0.03)
    assert metrics == validation_metrics(["s"] * 32, [0] * 32, infos)


@pytest.mark.parametrize("preds", [None, ["1", None]])
def test_there_is_no_majority_without_a_prediction_in_every_row(preds):
    infos = {"reward": [0.0, 1.0]} | ({"pred": preds} if preds else {})
    metrics = validation_metrics(["s", "s"], [0, 0], infos)
    assert not any("maj@" in name for name in metrics)


def test_two_prompts_with_one_text_are_two_prompts():
    rewards = [1.0, 0.0]
    assert numbers(["s", "s"], [0, 1], {"reward": rewards}) == {"val-core/s/reward/mean@1": 0.5}
    assert "val-core/s/reward/best@2/mean" in validation_metrics(["s", "s"], [0, 0], {"reward": rewards})


def test_numpy_numbers_count_as_numbers():
    metrics = validation_metrics(np.array(["s"], dtype=object), [0], {"reward": [np.float32(0.5)], "acc": [np.bool_(True)]})
    assert metrics["val-aux/s/reward/mean@1"] == 0.5
    assert metrics["val-core/s/acc/mean@1"] == 1.0
