"""When missing rewards end a run, and what the error says."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import RewardError
from lockstep.protocol import DataProto
from lockstep.rewards.outcome import Failure
from lockstep.trainer.ppo.missing_rewards import chance_of, check_failures, check_validated
from lockstep.trainer.ppo.scored import Scored


def batch_of(num_rows: int, num_missing: int, kind: str = "raised", retries: int = 0) -> tuple[DataProto, Scored]:
    failures = [Failure(kind, "Traceback\nValueError: why", num_retries=retries)] * num_missing + [None] * (num_rows - num_missing)
    batch = DataProto({}, {"index": list(range(num_rows))})
    return batch, Scored(failures, [0.0] * num_rows, retries=[retries] * num_rows)


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(1, 40), data=st.data(), rate=st.fractions(0, 1, max_denominator=20))
def test_the_chance_is_that_of_counted_outcomes(num_rows, data, rate):
    count = data.draw(st.integers(0, num_rows))
    exact = sum(comb(num_rows, k) * rate**k * (1 - rate) ** (num_rows - k) for k in range(count, num_rows + 1))
    assert isinstance(exact, Fraction | int)
    assert chance_of(count, num_rows, float(rate)) == pytest.approx(float(exact), abs=1e-9)


@pytest.mark.parametrize(
    ("num_rows", "num_missing", "rate", "ends"),
    [
        (16, 4, 0.1, False),
        (16, 6, 0.1, False),
        (16, 7, 0.1, True),
        (2, 2, 0.1, True),  # all
        (2, 2, 1.0, False),
        (1000, 100, 0.1, False),
        (1000, 150, 0.1, True),
        (50, 1, 0.0, True),
        (50, 0, 0.0, False),
    ],
)
def test_a_validation_ends_a_run_when_chance_does_not_explain_what_is_missing(num_rows, num_missing, rate, ends):
    if ends:
        with pytest.raises(RewardError):
            check_validated(*batch_of(num_rows, num_missing), rate)
    else:
        check_validated(*batch_of(num_rows, num_missing), rate)


@pytest.mark.parametrize(
    ("kind", "retries", "cure"),
    [
        ("raised", 0, "reward.retries=3"),
        ("timeout", 2, "raise reward.retries"),
        ("environment", 0, "agent.retries"),
        ("invalid", 0, "reward.max_failure_rate=0.25"),
    ],
)
def test_the_cure_and_the_file_stand_above_the_first_traceback_and_the_file_again_below_the_last(tmp_path, kind, retries, cure):
    with pytest.raises(RewardError) as caught:
        check_failures(*batch_of(16, 4, kind, retries), 0.1, tmp_path)
    text = str(caught.value)
    above, _, below = text.partition("Traceback")
    file = str(tmp_path / "reward_failures.jsonl")
    assert cure in above
    assert "reward.max_failure_rate=0.25" in above
    assert ("reward.retries" in above) == (kind in ("raised", "timeout"))
    assert file in above
    assert file in below.splitlines()[-1]


def test_the_rate_that_the_error_names_allows_what_was_missing():
    for num_missing in range(2, 17):
        batch, scored = batch_of(16, num_missing)
        with pytest.raises(RewardError) as caught:
            check_failures(batch, scored, 0.1)
        named = float(str(caught.value).partition("allow more with reward.max_failure_rate=")[2].split()[0])
        check_failures(batch, scored, named)
