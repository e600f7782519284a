"""Runs of one process: a debugger inside a worker, and a run that goes on from its checkpoint."""

import os
import subprocess
from pathlib import Path

import pytest
from helpers.program import PROGRAM, arguments
from helpers.run import roles, train

LOSS = """
from lockstep.algorithms.policy_losses import POLICY_LOSSES


def mine(*, old_log_prob, log_prob, advantages, response_mask, clip_ratio_low, clip_ratio_high, clip_ratio_c):
    breakpoint()
    return POLICY_LOSSES["vanilla"](**locals())
"""


def test_pdb_stops_inside_a_worker_of_the_program(embedded_config, tmp_path):
    """At a breakpoint() of the user's, then at one of the engine's that is set there. Nothing is traced until the first, so it is quick."""
    import lockstep.workers.engine.fsdp.engine as module

    source = Path(module.__file__)
    line = 2 + next(i for i, text in enumerate(source.read_text().splitlines()) if "def _apply_gradients" in text)
    (tmp_path / "mine.py").write_text(LOSS)
    commands = ["p ('loss of', len(log_prob))", f"b {source}:{line}", "c", "p ('steps', type(self).__name__)", "clear 1", "c"]
    result = subprocess.run(
        [*PROGRAM, *arguments(embedded_config()), "trainer.total_training_steps=1", "trainer.val_before_train=false",
         f"actor_rollout_ref.actor.policy_loss.loss_mode={tmp_path}/mine.py:mine"],
        input="\n".join(commands) + "\n", capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "('loss of', 8)" in result.stdout, result.stdout
    assert "('steps', 'FSDPEngine')" in result.stdout, result.stdout
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
