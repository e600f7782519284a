"""Runs of one process: a debugger inside a worker, and a run that goes on from its checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.program import arguments
from helpers.run import roles, train


def test_pdb_stops_inside_a_worker_of_the_program(embedded_config):
    import lockstep.workers.engine_workers as module

    source = Path(module.__file__)
    line = 1 + next(i for i, text in enumerate(source.read_text().splitlines()) if "loss_fn = functools.partial(self._loss" in text)
    commands = [f"b {source}:{line}", "c", "p ('stopped in', self.role, len(mini_batch))", "clear 1", "c", "q"]
    result = subprocess.run(
        [sys.executable, "-m", "pdb", *(part for c in commands for part in ("-c", c)), "-m", "lockstep.trainer.main_ppo",
         *arguments(embedded_config()), "trainer.total_training_steps=1", "trainer.val_before_train=false"],
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert "('stopped in', 'actor_rollout', 8)" in result.stdout, result.stdout + result.stderr
    assert "step 1/1" in result.stdout


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_an_interrupted_run_goes_on_from_its_checkpoint(embedded_config, tmp_path, strategy):
    more = [
        "trainer.val_before_train=false",
        "trainer.save_freq=2",
        "algorithm.kl_ctrl.type=adaptive",
        f"actor_rollout_ref.actor.strategy={strategy}",
        f"critic.strategy={strategy}",
    ]
    whole = embedded_config(*more, "trainer.total_training_steps=4", f"trainer.default_local_dir={tmp_path / 'whole'}")
    names = roles("ActorRollout", "Critic", "RefPolicy")
    expected = train(whole, {"global_pool": [1]}, names)
    first = embedded_config(*more, "trainer.total_training_steps=2")
    train(first, {"global_pool": [1]}, names)
    assert (first.trainer.run_dir / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = train(embedded_config(*more, "trainer.total_training_steps=4"), {"global_pool": [1]}, names)
    assert [row["step"] for row in resumed] == [1, 2, 3, 4]
    for name in ("critic/score/mean", "actor/grad_norm", "critic/vf_loss", "actor/reward_kl_penalty_coeff", "response_length/mean"):
        assert [row[name] for row in resumed] == pytest.approx([row[name] for row in expected], rel=1e-5), name
