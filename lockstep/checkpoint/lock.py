"""One run per folder: `run.lock` is locked by the process that writes there, and says who that is."""

import fcntl
import json
import os
import shutil
import socket
from pathlib import Path

from lockstep.errors import ResourceError

LOCK = "run.lock"
_LEAST_BYTES = 8 << 20
"""Where less is free, not even metrics and samples of a run have room."""
_held: set[Path] = set()
"""Locked by this process, whose own locks never stand in its way."""


def check_folder(folder: Path) -> None:
    """Raise ResourceError where the folder can neither be written nor made. Makes nothing."""
    advice = "choose another with trainer.default_local_dir"
    try:
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise ResourceError(f"the run's folder {folder} cannot be made: {nearest} is a file; {advice}")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ResourceError(f"the run's folder {folder} cannot be written: {nearest} is read-only for this user; {advice}")
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        raise ResourceError(
            f"the run's folder {folder} cannot be written: {error.strerror} ({error.filename}); {advice}"
        ) from error
    if free < _LEAST_BYTES:
        raise ResourceError(f"no space left for the run's folder {folder}: {free / 1e6:.1f} MB are free; free some, or {advice}")


class FolderLock:
    """Holds `folder`, which is made if need be, from construction to `release`, or until the process ends in whatever way.

    Raises ResourceError, with the host and the process of the run that holds it, and where the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path = (folder / LOCK).resolve()
            (folder / LOCK).touch()
        except OSError as error:
            raise ResourceError(
                f"the run's folder {folder} cannot be written: {error.strerror} ({error.filename}); choose another with "
                "trainer.default_local_dir"
            ) from error
        if self._path in _held:
            raise ResourceError(f"{folder} is in use by another run in this process ({os.getpid()}); close() it first")
        # lockf, not flock: children of a process do not hold its locks, and one that outlives it would lock the folder for good.
        self._file = self._path.open("a+")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read()
            self._file.close()
            raise ResourceError(
                f"{folder} is in use by another run ({_describe(holder)}); wait for it, end it, or choose another folder with "
                "trainer.experiment_name or trainer.default_local_dir"
            ) from error
        self._file.truncate(0)
        self._file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        self._file.flush()
        _held.add(self._path)

    def release(self) -> None:
        """Let others have the folder. May be called again."""
        if self._path in _held and not self._file.closed:
            _held.remove(self._path)
            self._file.close()


def _describe(holder: str) -> str:
    try:
        found = json.loads(holder)
        return f"host {found['host']}, pid {found['pid']}"
    except (ValueError, LookupError, TypeError):
        return "which has not said who it is"
