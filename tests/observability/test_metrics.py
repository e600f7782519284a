import math
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.observability.metrics import Max, Mean, Min, Sum, average_updates, merge_metrics, values

KINDS = (Mean(3.0, 2.0), Sum(3.0), Max(3.0), Min(3.0))
# Whole numbers add up exactly in floating point, so equality is exact.
counts = st.integers(-(2**20), 2**20).map(float)
parts = st.lists(st.tuples(counts, st.integers(0, 2**20).map(float)), min_size=1, max_size=12)


@given(parts, st.randoms(use_true_random=False))
def test_a_mean_does_not_depend_on_the_order_or_grouping_of_its_parts(pairs: list, rng: random.Random) -> None:
    expected = Mean(sum(t for t, _ in pairs), sum(w for _, w in pairs))
    pending = [{"m": Mean(total, weight)} for total, weight in pairs]
    while len(pending) > 1:
        rng.shuffle(pending)
        cut = rng.randint(2, len(pending))
        pending = [merge_metrics(pending[:cut]), *pending[cut:]]
    assert pending[0]["m"] == expected


@given(st.lists(st.floats(), min_size=1, max_size=8))
def test_extremes_are_those_of_all_parts_and_a_nan_anywhere_stays(numbers: list[float]) -> None:
    merged = merge_metrics([{"high": Max(x), "low": Min(x)} for x in numbers])
    extremes = [merged["high"].value, merged["low"].value]
    if any(map(math.isnan, numbers)):
        assert all(map(math.isnan, extremes))
    else:
        assert extremes == [max(numbers), min(numbers)]


def test_merge_adds_up_by_kind_and_accepts_missing_metrics() -> None:
    one = {"loss": Mean(6.0, 3.0), "tokens": Sum(3.0), "peak": Max(1.0), "low": Min(1.0)}
    two = {"loss": Mean(4.0, 1.0), "tokens": Sum(1.0), "peak": Max(5.0), "low": Min(-5.0), "only_here": Sum(7.0)}
    assert values(merge_metrics([one, two])) == {"loss": 2.5, "tokens": 4.0, "peak": 5.0, "low": -5.0, "only_here": 7.0}
    assert merge_metrics([]) == {}


def test_the_kind_decides_the_reduction_not_the_name() -> None:
    merged = merge_metrics([{"grad_max": Mean(1.0), "min": Sum(1.0)}, {"grad_max": Mean(3.0), "min": Sum(3.0)}])
    assert values(merged) == {"grad_max": 2.0, "min": 4.0}


def test_updates_average_with_equal_weight_and_keep_extremes() -> None:
    first = {"loss": Mean(10.0, 10.0), "tokens": Sum(10.0), "peak": Max(1.0), "low": Min(1.0)}
    second = {"loss": Mean(3.0, 1.0), "tokens": Sum(2.0), "peak": Max(4.0), "low": Min(2.0), "late": Mean(8.0)}
    expected = {"loss": 2.0, "tokens": 6.0, "peak": 4.0, "low": 1.0, "late": 8.0}
    assert average_updates([first, second]) == expected


def test_updates_leave_out_means_of_nothing_but_not_broken_numbers() -> None:
    nothing, some, broken = Mean(0.0, 0.0), Mean(4.0, 2.0), Mean(math.nan, 2.0)
    averaged = average_updates([{"a": nothing, "b": nothing, "c": broken}, {"a": some, "b": nothing, "c": some}])
    assert math.isnan(nothing.value)
    assert averaged["a"] == 2.0
    assert "b" not in averaged
    assert math.isnan(averaged["c"])
    assert values({"a": nothing, "b": some}) == {"b": 2.0}


@pytest.mark.parametrize("one", KINDS, ids=lambda m: type(m).__name__)
def test_kinds_do_not_mix_and_the_error_names_the_metric(one: Mean | Sum | Max | Min) -> None:
    for other in KINDS:
        if type(other) is type(one):
            assert type(one.merge(other)) is type(one)
            continue
        with pytest.raises(TypeError, match=f"{type(one).__name__} with a {type(other).__name__}"):
            one.merge(other)
        for join in (merge_metrics, average_updates):
            with pytest.raises(TypeError, match="'actor/x'"):
                join([{"actor/x": one}, {"actor/x": other}])


def test_metrics_survive_pickling() -> None:
    assert pickle.loads(pickle.dumps(KINDS)) == KINDS
