"""Where a run starts: the checkpoint that it goes on from, if it may."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.checkpoint import folders
from lockstep.checkpoint.manifest import check_manifest
from lockstep.config.identity import check_resumable, kept_values
from lockstep.config.trainer import RunConfig
from lockstep.errors import ConfigError, DataError


def find_checkpoint(
    config: Any, section: RunConfig, is_own: bool, say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that a recipe's configuration names, in its `section`, or (`is_own`) the newest whole one in the run's folder. With
    its state.

    Raises ConfigError where the folder has checkpoints that the run does not go on from or the configuration differs from the
    checkpoint's, and DataError where that is damaged.
    """
    folder = folders.newest_whole(section.run_dir, say) if is_own else None
    if folder is None and section.resume_mode == "resume_path":
        folder = Path(str(section.resume_from_path))
        check_manifest(folder)
    if not is_own:
        _refuse_used_folder(section, folder)
    if folder is None:
        return None
    state = folders.read_state(folder)
    recipe = type(config).__name__
    if state.get("recipe") != recipe:
        raise DataError(f"{folder} is a checkpoint of another kind of training: {state.get('recipe')}, not {recipe}")
    if not {"config", "left_out"} <= state.keys():
        raise DataError(f"{folder / folders.STATE} is not one of this version: it has no settings to compare with")
    check_resumable(state["config"], kept_values(config), section.allow_changes, str(folder))
    return folder, state


def _refuse_used_folder(section: RunConfig, start: Path | None) -> None:
    """Raise ConfigError where the folder has checkpoints other than `start` and those before it."""
    run_dir = section.run_dir
    names = [folder.name for folder in folders.found(run_dir)]
    if start is not None and start.resolve().parent == run_dir.resolve():
        names = names[names.index(start.name) + 1 :]
    if names:
        raise ConfigError(
            f"{run_dir} has checkpoints of another run ({', '.join(names)}), and trainer.resume_mode={section.resume_mode} "
            "does not go on from them; set trainer.resume_mode=auto to go on, choose another folder with trainer.experiment_name or "
            "trainer.default_local_dir, or move them away"
        )
