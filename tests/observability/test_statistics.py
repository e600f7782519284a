import math
import random

import pytest

from lockstep.observability.statistics import Z_95, wilson_interval


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
