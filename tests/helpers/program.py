"""The PPO program as a process: its command line, and waiting for what it does."""

from __future__ import annotations

import sys
import time

PROGRAM = [sys.executable, "-m", "lockstep.trainer.main_ppo"]


def arguments(config):
    """The command line that says the same as `config` where it differs from the defaults of the tests."""
    return [
        f"data.train_files={config.data.train_files}",
        f"data.val_files={config.data.val_files}",
        "data.val_max_samples=32",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "data.train_batch_size=8",
        f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}",
        f"trainer.default_local_dir={config.trainer.run_dir}",
        "trainer.device=cpu",
    ]


def wait_until(condition, timeout_s, program, log):
    """Until `condition()`; fails with the log, a file, when the process `program` ends before or the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = program.poll()  # before the condition: what the program did at its end counts
        if condition():
            return
        if status is not None or time.monotonic() > deadline:
            reason = f"not within {timeout_s} s" if status is None else f"it ended with {status}"
            raise AssertionError(f"{reason}; its log ends:\n{log.read_text()[-4000:]}")
        time.sleep(0.2)


def num_steps(config):
    """Steps that the run has recorded so far."""
    file = config.trainer.run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0
