"""`lockstep capsule RUN --step N`: write one repro file from which `lockstep replay` repeats that step (trainer/run/capsule.py)."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.checkpoint import folders
from lockstep.errors import DataError, as_command
from lockstep.tools.replay.command import program_of
from lockstep.utils.terminal import say


@as_command
def main(arguments: Sequence[str]) -> int:
    """Write the repro file; return 1 if the run has no such step."""
    parser = argparse.ArgumentParser(
        "lockstep capsule", description="Put a step of a run into one file that lockstep replay reads."
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="which step, from 1")
    parser.add_argument("--out", type=Path, help="the file (default: capsule_step_N.json in the run's folder)")
    given = parser.parse_args(arguments)
    state = _newest_state(given.run)
    from lockstep.trainer.run.capsule import write_capsule  # brings torch

    program = program_of(state["recipe"])
    overrides = [
        f"trainer.default_local_dir={given.run}",
        "trainer.worker_group=local",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.device=cpu",
    ]
    config = program.load(overrides, given.run / "config.yaml")
    with program.opened(config) as run:
        run.left_out[:] = state["left_out"]
        path = write_capsule(run, given.step, path=given.out)
    say(f"step {given.step} is in {path}: lockstep replay {path}")
    return 0


def _newest_state(run_dir: Path) -> dict[str, Any]:
    """Return the state in the newest checkpoint of a run. Raises DataError if the folder has none."""
    if not (run_dir / "config.yaml").is_file():
        raise DataError(f"{run_dir} is not the folder of a run: there is no config.yaml in it")
    newest = folders.newest(run_dir)
    if newest is None:
        raise DataError(f"{run_dir} has no checkpoint to replay from; set trainer.save_freq")
    return folders.read_state(newest)
