"""`{run_dir}/global_step_N`: written under another name, then renamed, so that a folder of that name is always complete.

```text
global_step_20/
  actor/   critic/          Hugging Face folders with the optimizer's state beside the weights
  trainer_state.json        what the driver needs to go on
latest_checkpointed_iteration.txt
```
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import DataError

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "trainer_state.json"
_PREFIX = "global_step_"


@contextmanager
def publishing(run_dir: Path, step: int) -> Iterator[Path]:
    """A folder to write a checkpoint into. It gets its name, and the tracker names it, only when the block ends without an error."""
    final = run_dir / f"{_PREFIX}{step}"
    draft = run_dir / f"{_PREFIX}{step}.incomplete"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield draft
    for path in (*draft.rglob("*"), draft):
        _sync(path)
    if final.exists():
        _remove(final)
    draft.rename(final)
    tracker = run_dir / f"{TRACKER}.incomplete"
    tracker.write_text(str(step))
    _sync(tracker)
    tracker.rename(run_dir / TRACKER)
    _sync(run_dir)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the driver's part of a checkpoint."""
    (folder / STATE).write_text(json.dumps(state, indent=1))


def read_state(folder: Path) -> dict[str, Any]:
    """Read the driver's part. Raises DataError when `folder` is not a complete checkpoint."""
    try:
        return json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} is not a checkpoint: {STATE} cannot be read ({error}); expected a global_step_N folder"
        ) from error


def newest(run_dir: Path) -> Path | None:
    """The checkpoint with the highest step, or None."""
    found = _complete(run_dir)
    return found[-1] if found else None


def prune(run_dir: Path, keep: int | None) -> None:
    """Delete the oldest checkpoints beyond `keep`; None keeps all."""
    for folder in _complete(run_dir)[: -keep if keep else 0]:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Take the name away first: a crash in the middle must not leave half a checkpoint under it."""
    aside = folder.with_name(f"{folder.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def _complete(run_dir: Path) -> list[Path]:
    folders = [p for p in run_dir.glob(f"{_PREFIX}*") if p.name.removeprefix(_PREFIX).isdigit() and (p / STATE).is_file()]
    return sorted(folders, key=lambda p: int(p.name.removeprefix(_PREFIX)))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
