"""A killed run goes on as if nothing had happened: same weights, moments and metrics, to the bit (helpers/kills.py is the harness)."""

import pytest
from helpers.kills import CASES, kill_runs, small_runs

from lockstep.tools.verify_resume.compare import end_of


@pytest.mark.parametrize("case", ["PPO, fsdp2", "GRPO, fsdp2"])
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(embedded_task, tmp_path, case):
    found = kill_runs(small_runs(embedded_task, *CASES[case]), tmp_path, num_kills=16, seed=0)
    assert found.kills >= 16
    assert found.different == []


@pytest.mark.parametrize("warmup", [0, 3])
def test_how_often_and_how_a_run_saves_changes_no_bit_of_its_end(embedded_task, tmp_path, warmup):
    def end(*keys):
        run_dir = tmp_path / "_".join(keys).replace("=", "_")
        keys = ("trainer.total_training_steps=4", f"trainer.critic_warmup={warmup}", *keys)
        small_runs(embedded_task, *CASES["PPO, fsdp2"], *keys)(run_dir)
        return {name: found for name, found in end_of(run_dir).items() if name != "checkpoints"}

    expected = end("trainer.save_freq=-1")
    assert end("trainer.save_freq=1") == expected
    assert end("trainer.save_freq=3", "trainer.save_in_background=false") == expected
