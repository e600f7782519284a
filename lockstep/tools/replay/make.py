"""`lockstep capsule RUN --step N`: one file from which that step can be done again (trainer/run/capsule.py)."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from lockstep.checkpoint import folders
from lockstep.errors import DataError, as_command
from lockstep.tools.replay import PROGRAMS
from lockstep.utils.printable import say


@as_command
def main(arguments: Sequence[str]) -> int:
    """Write the capsule; 1 where the run has no such step."""
    parser = argparse.ArgumentParser(
        "lockstep capsule", description="Put a step of a run into one file that lockstep replay reads."
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="which step, from 1")
    parser.add_argument("--out", type=Path, help="the file (default: capsule_step_N.json in the run's folder)")
    given = parser.parse_args(arguments)
    recipe = _recipe(given.run)
    from lockstep.trainer.run.capsule import write_capsule  # brings torch

    program = importlib.import_module(PROGRAMS[recipe])
    keys = [f"trainer.default_local_dir={given.run}", "trainer.worker_group=local", "trainer.n_gpus_per_node=1", "trainer.nnodes=1"]
    with program.opened(program.load([*keys, "trainer.device=cpu"], given.run / "config.yaml")) as run:
        newest = folders.newest(given.run)
        run.left_out[:] = folders.read_state(newest)["left_out"] if newest is not None else []
        path = write_capsule(run, given.step, path=given.out)
    say(f"step {given.step} is in {path}: lockstep replay {path}")
    return 0


def _recipe(run_dir: Path) -> str:
    """The class of the run's configuration, from its newest checkpoint."""
    if not (run_dir / "config.yaml").is_file():
        raise DataError(f"{run_dir} is not the folder of a run: there is no config.yaml in it")
    newest = folders.newest(run_dir)
    if newest is None:
        raise DataError(f"{run_dir} has no checkpoint to replay from; set trainer.save_freq")
    return str(folders.read_state(newest)["recipe"])
