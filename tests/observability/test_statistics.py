import itertools
import math
import random
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.observability.score_summary import _majority
from lockstep.observability.statistics import (
    Z_95,
    clustered_interval,
    compare,
    estimate,
    expected_best,
    flip_test,
    mcnemar,
    paired_interval,
    ranged_interval,
    t_95,
    t_interval,
    wilson_interval,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.intervals import accuracy_of, chances_of, expected, majority_table, passes, simulate, wins


@pytest.mark.parametrize(("right", "count"), [(0, 10), (10, 10), (50, 100), (251, 256), (128.5, 256)])
def test_at_its_ends_the_share_is_just_so_many_standard_deviations_off(right: float, count: int) -> None:
    """Which defines it, with the deviation of the end itself; where all or none came out, one end is theirs."""
    for end in wilson_interval(right, count):
        deviation = math.sqrt(end * (1 - end) / count)
        assert abs(right / count - end) == pytest.approx(Z_95 * deviation, abs=1e-7)


def test_without_trials_nothing_is_known() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.97])
def test_it_covers_the_probability_about_19_times_in_20(probability: float) -> None:
    draw, covered = random.Random(0), 0
    for _ in range(2000):
        low, high = wilson_interval(sum(draw.random() < probability for _ in range(60)), 60)
        covered += low <= probability <= high
    assert 0.925 < covered / 2000 < 0.975


@settings(max_examples=60, deadline=None)
@given(scores=st.lists(st.floats(-5, 5), min_size=1, max_size=6), data=st.data())
def test_the_expected_best_is_the_mean_over_all_choices(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    every = [max(chosen) for chosen in itertools.combinations(scores, k)]
    assert expected_best(scores, k) == pytest.approx(statistics.fmean(every), abs=1e-9)


@given(num_samples=st.integers(1, 40), data=st.data())
def test_the_expected_best_of_right_and_wrong_is_pass_at_k(num_samples: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, num_samples)), data.draw(st.integers(1, num_samples))
    expected = 1 - math.comb(num_samples - right, k) / math.comb(num_samples, k)
    assert expected_best([1.0] * right + [0.0] * (num_samples - right), k) == pytest.approx(expected, abs=1e-12)


def test_the_quantiles_of_t_are_those_of_the_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 29: 2.045, 100: 1.984, 10**6: 1.960}
    assert {freedom: t_95(freedom) for freedom in table} == pytest.approx(table, abs=0.004)


def test_one_right_or_wrong_sample_per_question_has_wilsons_interval() -> None:
    assert estimate([1, 0, 0], 3).interval == wilson_interval(1, 3)
    assert estimate([1.0], 1).interval == wilson_interval(1, 1)


def test_samples_of_one_question_are_no_questions() -> None:
    """Ten questions with ten samples that are always alike say what ten samples say, not a hundred."""
    alike, mixed = [1.0] * 5 + [0.0] * 5, [0.5] * 10
    low, high = estimate(alike, 100).interval or (0, 0)
    narrow = estimate(mixed, 100).interval or (0, 0)
    single = wilson_interval(5, 10)
    assert high - low == pytest.approx(single[1] - single[0], rel=0.15)
    assert narrow[1] - narrow[0] < high - low, "where questions agree, samples count"


def test_scores_on_any_scale_have_the_interval_of_their_range_at_least_as_wide_as_students() -> None:
    low, high = estimate([-1.0] * 12 + [1.0] * 18, None).interval or (0, 0)
    assert ((low + 1) / 2, (high + 1) / 2) == pytest.approx(wilson_interval(18, 30), abs=0.025), "right and wrong, by other numbers"
    values = [-1.0, 2.0, 4.0]
    half = 4.303 * statistics.stdev(values) / math.sqrt(3)
    found = estimate(values, None).interval or (0, 0)
    assert found[1] - found[0] >= 2 * half - 1e-3
    low, high = ranged_interval(np.array([-2.0, -1.0, 0.0, 1.0, 2.0] * 50))
    assert (-low, high) == pytest.approx((t_interval(np.array([-2.0, -1.0, 0.0, 1.0, 2.0] * 50))[1],) * 2)


@given(scale=st.floats(0.01, 100), shift=st.floats(-100, 100), values=st.lists(st.integers(-20, 20), min_size=2, max_size=30))
def test_the_interval_goes_along_with_the_scale(scale: float, shift: float, values: list[int]) -> None:
    array = np.array(values, dtype=np.float64)
    if array.min() == array.max():
        return
    low, high = ranged_interval(array)
    assert low <= array.mean() <= high
    assert ranged_interval(scale * array + shift) == pytest.approx((scale * low + shift, scale * high + shift), abs=1e-6)
    assert ranged_interval(-array) == pytest.approx((-high, -low), abs=1e-9)


@pytest.mark.parametrize(("values", "num_samples"), [([0.5], 4), ([2.0], None), ([-1.0, -1.0], None)])
def test_there_is_no_interval_where_the_data_cannot_say(values: list[float], num_samples: int | None) -> None:
    assert estimate(values, num_samples).interval is None


def test_a_score_between_0_and_1_says_more_than_right_or_wrong() -> None:
    values = np.random.default_rng(0).uniform(0.4, 0.6, 200)
    low, high = estimate(values.tolist(), None).interval or (0, 0)
    students = t_interval(values)
    assert (low, high) == pytest.approx((float(students[0]), float(students[1])), abs=0.002)


def test_all_or_none_right_still_has_a_width() -> None:
    assert estimate([1.0] * 10, 40).interval == pytest.approx(wilson_interval(10, 10)), (
        "ten questions, however often they were asked"
    )


@given(better=st.integers(0, 30), worse=st.integers(0, 30))
def test_mcnemar_is_the_probability_of_so_uneven_a_split(better: int, worse: int) -> None:
    total = better + worse
    uneven = [i for i in range(total + 1) if abs(2 * i - total) >= abs(better - worse)]
    assert mcnemar(better, worse) == pytest.approx(sum(math.comb(total, i) for i in uneven) / 2**total)


def test_flipping_signs_is_mcnemars_test_where_each_question_has_one_sample() -> None:
    differences = np.array([1.0] * 9 + [-1.0] * 2 + [0.0] * 40)
    assert float(flip_test(differences)) == pytest.approx(mcnemar(9, 2), abs=0.006)
    assert float(flip_test(np.zeros(5))) == 1.0
    assert flip_test(1000 * differences) == flip_test(differences)


@given(better=st.integers(0, 12), worse=st.integers(0, 12), ties=st.integers(1, 40))
def test_the_paired_interval_has_the_differences_that_the_score_test_does_not_reject(better: int, worse: int, ties: int) -> None:
    """By definition, with the likelihood's maximum by search. At 0 that is McNemar's test without correction."""
    count = better + worse + ties
    low, high = paired_interval(np.array([1.0] * better + [-1.0] * worse + [0.0] * ties), is_single=True)
    for end, sign in ((low, -1), (high, 1)):
        only = np.linspace(max(0.0, -end), (1 - end) / 2, 20001)[1:-1]  # the probability that the second model alone is right
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = [k * np.log(p) if k else 0.0 * p for k, p in ((better, only + end), (worse, only), (ties, 1 - 2 * only - end))]
        best = only[np.argmax(sum(logs))]
        deviation = math.sqrt(count * (2 * best + end - end**2))
        assert sign * (count * end - better + worse) == pytest.approx(Z_95 * deviation, rel=0.02, abs=0.02)
    if better + worse:
        assert (low <= 0 <= high) == ((better - worse) ** 2 / (better + worse) <= Z_95**2)


def test_a_comparison_counts_the_questions_for_either_model() -> None:
    found = compare([[1], [1], [0], [1]], [[0], [1], [1], [0]])
    assert (found.num_better, found.num_worse, found.num_questions, found.estimate.value) == (2, 1, 4, 0.25)
    assert found.p_value == mcnemar(2, 1)
    several = compare([[1, 1], [1, 0], [0, 0]], [[0, 1], [1, 0], [1, 0]])
    assert (several.num_better, several.num_worse, several.estimate.value) == (1, 1, 0.0)
    assert several.estimate.interval == pytest.approx([float(end) for end in t_interval(np.array([0.5, 0.0, -0.5]))])


def test_equal_differences_of_several_samples_have_no_interval() -> None:
    """Two models that are wrong in all samples of three questions may yet differ; of one sample each Tango says by how much."""
    for new, old in (([[0, 0]] * 3, [[0]] * 3), ([[0.5, 0.25]] * 2, [[0.125]] * 2)):
        assert compare(new, old).estimate.interval is None
    low, high = compare([[0]] * 3, [[0]] * 3).estimate.interval
    assert low == pytest.approx(-high)
    assert high > 0.5


def test_leading_axes_are_simulations() -> None:
    values = np.random.default_rng(0).uniform(0, 1, (3, 2, 20))
    low, high = clustered_interval(values, 80)
    one = clustered_interval(values[1, 1], 80)
    assert (low[1, 1], high[1, 1]) == (one[0], one[1])


def test_the_simulated_truth_is_what_samples_come_to() -> None:
    """Of the population that benchmarks/intervals.py draws from; majorities are those that score_summary counts."""
    rng = np.random.default_rng(0)
    for won in (passes(4), wins(4)):
        truth = np.array([0.1, 0.5, 0.9])
        accuracy = accuracy_of(truth, won, 0.4)
        assert expected(accuracy, won, 0.4) == pytest.approx(truth)
        drawn = rng.binomial(4, chances_of(rng, accuracy, 100_000, 0.4))
        assert won[drawn].mean(1) == pytest.approx(truth, abs=0.006)
    table = majority_table(8, 4)
    for code in (0, 1, 54321, 65535, 7 * 4096 + 9):
        answers = [code // 4**i % 4 for i in range(8)]
        counted = _majority([float(answer == 0) for answer in answers], list(map(str, answers)), 4)
        assert table[code] == pytest.approx(counted), answers


@pytest.mark.slow
def test_intervals_cover_and_alarms_are_rare() -> None:
    """A small part of benchmarks/results/intervals.json: 1,000 simulations know a share of 0.95 to 0.7 points (one deviation)."""
    for row in simulate(1000, questions=(164,)):
        if row["what"].startswith("false alarm"):
            assert row["share"] < 0.065, row
        elif "extreme" in row["what"]:
            assert row["share"] > 0.92, row
        else:
            least = 0.88 if "log-normal" in row["what"] else 0.925
            assert least < row["share"] < 0.98, row
