"""A killed run goes on as if nothing had happened: same weights, moments and metrics, to the bit (helpers/kills.py is the harness)."""

import pytest
from helpers.kills import CASES, kill_runs, small_runs


@pytest.mark.parametrize("case", ["PPO, fsdp2", "GRPO, fsdp2"])
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(embedded_task, tmp_path, case):
    found = kill_runs(small_runs(embedded_task, *CASES[case]), tmp_path, num_kills=16, seed=0)
    assert found.kills >= 16
    assert found.different == []
