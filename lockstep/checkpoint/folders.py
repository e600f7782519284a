"""`{run_dir}/global_step_N`: written under another name, then renamed, so that a folder of that name is always complete.

```text
global_step_20/
  actor/   critic/          Hugging Face folders with the optimizer's state beside the weights
  trainer_state.json        what the driver needs to go on
  manifest.json             size and checksum of every file
latest_checkpointed_iteration.txt
run.lock                    who writes here
```
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint.manifest import Entry, check_manifest, write_manifest
from lockstep.errors import DataError

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "trainer_state.json"
_PREFIX = "global_step_"


def make_draft(run_dir: Path, step: int) -> Path:
    """A new folder to write a checkpoint into; `publish` gives it its name."""
    draft = run_dir / f"{_PREFIX}{step}.incomplete"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def publish(draft: Path, known: Mapping[str, Entry]) -> Path:
    """Write the manifest of a draft, give it its name and let the tracker name it; returns the checkpoint.

    `known` are the manifest's entries that need not be computed.
    """
    write_manifest(draft, known)
    for path in (*draft.rglob("*"), draft):
        sync(path)
    final = draft.with_suffix("")
    before = _rename_aside(final, "removed") if final.exists() else None
    draft.rename(final)
    _write_tracker(final)
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)
    return final


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the driver's part of a checkpoint."""
    (folder / STATE).write_text(json.dumps(state, indent=1))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_numbers(value: Any) -> bool:
    """By name; one may be nan, or null."""
    return isinstance(value, dict) and all(isinstance(number, int | float | None) for number in value.values())


def _is_counts_by_pool(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(own, dict) and all(map(_is_count, own.values())) for own in value.values())


def _is_pairs_of_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(own, list) and len(own) == 2 and all(map(_is_count, own)) for own in value.values()
    )


_STATE_KEYS: dict[str, Callable[[Any], bool]] = {
    "global_steps": _is_count,
    "config": lambda value: isinstance(value, dict),
    "left_out": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "validation_before": _is_numbers,
    "validation_before_rows": _is_pairs_of_counts,
    "metrics": _is_numbers,
    "num_prompt_batches": _is_count,
    "num_train_rows": _is_count,
    "reward_failures_bytes": _is_count,
    "train_files_digest": lambda value: isinstance(value, str),
    "numbers": _is_counts_by_pool,
    "sampler_drift": lambda value: isinstance(value, int | float | None),
    "kl_control": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
}
"""What the values in the driver's part must be, where it has them: another run's may have been changed by hand."""


def read_state(folder: Path) -> dict[str, Any]:
    """Read the driver's part. Raises DataError when `folder` is not a complete checkpoint."""
    try:
        state = json.loads((folder / STATE).read_text())
        wrong = [key for key, is_right in _STATE_KEYS.items() if key in state and not is_right(state[key])]
        if wrong or "global_steps" not in state:
            key = wrong[0] if wrong else "global_steps"
            raise ValueError(f"{key} is {state.get(key)!r:.80}")
        return state
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{folder} is not a checkpoint: {STATE} cannot be read ({error}); expected a global_step_N folder"
        ) from error


def found(run_dir: Path) -> list[Path]:
    """The checkpoints, the newest last. Whether their files are as they were written is for `newest_whole` to say."""
    folders = [p for p in run_dir.glob(f"{_PREFIX}*") if p.name.removeprefix(_PREFIX).isdigit() and p.is_dir()]
    return sorted(folders, key=lambda p: int(p.name.removeprefix(_PREFIX)))


def newest(run_dir: Path) -> Path | None:
    """The checkpoint with the highest step, or None."""
    folders = found(run_dir)
    return folders[-1] if folders else None


def newest_whole(run_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are as they were written, or None.

    A newer one that is not is said and put aside as `global_step_N.damaged`. Raises DataError where there are checkpoints, and no whole
    one.
    """
    damaged: dict[Path, DataError] = {}
    for folder in reversed(found(run_dir)):
        try:
            check_manifest(folder)
        except DataError as error:
            damaged[folder] = error
            continue
        for other, why in damaged.items():
            say(f"warning: {why}. This checkpoint is not used, and is now {_rename_aside(other, 'damaged').name}")
        return folder
    if damaged:
        raise DataError(
            f"{run_dir} has no checkpoint that is whole: {'; '.join(map(str, damaged.values()))}. Restore one of them, or start again in "
            "another folder (trainer.experiment_name or trainer.default_local_dir)"
        )
    return None


def prune(run_dir: Path, keep: int | None, spared: Collection[Path | None] = ()) -> None:
    """Delete the oldest checkpoints beyond `keep`, but not those that are spared; None keeps all. What is left of one that was deleted
    before goes too."""
    for leftover in run_dir.glob(f"{_PREFIX}*.removed"):
        shutil.rmtree(leftover, ignore_errors=True)
    for folder in found(run_dir)[: -keep if keep else 0]:
        if folder not in spared:
            # Its name is taken away first: a crash in the middle must not leave half a checkpoint under it.
            shutil.rmtree(_rename_aside(folder, "removed"))


def remove_leftovers(run_dir: Path) -> None:
    """Delete what a killed run was writing or deleting. Only for who has the folder's lock."""
    for pattern in ("incomplete", "removed"):
        for folder in run_dir.glob(f"{_PREFIX}*.{pattern}"):
            shutil.rmtree(folder, ignore_errors=True)


def repair_tracker(run_dir: Path) -> None:
    """Let the tracker name the newest checkpoint: a run that was killed between two renames left it behind. Only for who has the folder's
    lock."""
    last = newest(run_dir)
    tracker = run_dir / TRACKER
    if last is None or (tracker.is_file() and tracker.read_text() == last.name.removeprefix(_PREFIX)):
        return
    _write_tracker(last)


def _write_tracker(checkpoint: Path) -> None:
    """Name a checkpoint in the tracker of its run."""
    run_dir = checkpoint.parent
    draft = run_dir / f"{TRACKER}.incomplete"
    draft.write_text(checkpoint.name.removeprefix(_PREFIX))
    sync(draft)
    draft.rename(run_dir / TRACKER)
    sync(run_dir)


def _rename_aside(folder: Path, why: str) -> Path:
    aside = folder.with_name(f"{folder.name}.{why}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    return aside


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
