"""Saver: from a draft whose files are still being written to a checkpoint with its name, while the run goes on.

```text
begin -> the recipe writes, or lets its workers begin to -> publish -> (a thread) wait for the workers, manifest, name, prune
```
"""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.checkpoint import folders
from lockstep.checkpoint.manifest import Entry
from lockstep.errors import DataError, ResourceError

_POLL_S = (0.01, 0.5)


class Saver:
    """Saves one checkpoint of a run at a time. The run goes on while files are written, and waits before the next one.

    A save that fails leaves older checkpoints alone. With `stops` it is raised, by the next call; else it is said, and the run goes on.
    `keep` and `metric` say which checkpoints stay: the last so many, and the best by that number of their state's "metrics".
    """

    def __init__(
        self, run_dir: Path, *, keep: int | None, metric: str | None, lowest: bool, stops: bool, say: Callable[[str], None]
    ) -> None:
        self._run_dir = run_dir
        self._keep = keep
        self._metric = metric
        self._lowest = lowest
        self._stops = stops
        self._say = say
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._unpruned: list[str] = []
        """What is to be said of checkpoints that should not be there any more."""
        self._cancelled = threading.Event()
        self._reason = ""
        self._step = 0
        self.failed: int | None = None
        """The step of the last save, where it failed."""

    def begin(self, step: int) -> Path:
        """A folder to write the checkpoint of a step into. Waits for the one before."""
        self.wait()
        self._cancelled.clear()
        self._step = step
        self.failed = None
        return folders.make_draft(self._run_dir, step)

    def publish(self, draft: Path, reports: Sequence[Path], durable: Sequence[Path], *, waits: bool = False) -> None:
        """Make a draft a checkpoint, as soon as all `reports` are there: what those who write its files say when they are done
        (`write_report`). `durable` are files that must not be lost once the checkpoint is there. With `waits` it is there on return."""

        def finish() -> None:
            try:
                for path in durable:
                    folders.sync(path)
                folders.publish(draft, self._collect(draft, reports))
            except Exception as error:
                self._error = error
                shutil.rmtree(draft, ignore_errors=True)  # at once: metrics need some of the space
            else:
                self.prune()

        if reports and not waits:
            self._thread = threading.Thread(target=finish, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            finish()
            self.check()

    def fail(self, error: Exception) -> None:
        """Take note that the checkpoint that was begun cannot be written."""
        self._error = error
        self.check()

    def check(self) -> None:
        """Raise, or say, what went wrong with the last save, if it did."""
        if self._thread is not None and self._thread.is_alive():
            return
        texts = self._unpruned
        self._unpruned = []
        for text in texts:
            self._say(f"warning: {text}")
        error = self._error
        self._error = None
        if error is None:
            return
        self.failed = self._step
        for draft in self._run_dir.glob("global_step_*.incomplete"):
            shutil.rmtree(draft, ignore_errors=True)
        text = f"the checkpoint of step {self.failed} was not saved: {describe_failure(error)}. Older ones are as they were"
        if self._stops:
            raise ResourceError(f"{text}; trainer.on_save_failure=continue would go on without it") from error
        self._say(f"warning: {text}; the run goes on (trainer.on_save_failure=continue)")

    def wait(self) -> None:
        """Wait until the last save is done, and `check` it."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def cancel(self, reason: str) -> None:
        """Give up on a save that still waits for others; `wait` says why."""
        self._reason = reason
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Give up on a save that still waits for others, without a word. The next save begins afresh."""
        self.cancel("the run ended before it was written")
        self._error = None
        self._unpruned = []

    def prune(self) -> None:
        """Delete the checkpoints that are not to be kept. One whose state cannot be read may be the best, and stays. What could not be
        deleted is said by the next `check`: the checkpoint that was saved is there all the same."""
        try:
            known, unread = self._values()
            self._unpruned = [f"{error}; it is not deleted, and not compared with others" for error in unread.values()]
            folders.prune(self._run_dir, self._keep, spared={self._best_of(known), *unread})
        except OSError as error:
            self._unpruned.append(f"an older checkpoint was not deleted, the next save tries again: {describe_failure(error)}")

    def best(self) -> Path | None:
        """The checkpoint with the best metric, or None where no metric is asked for or no checkpoint has it."""
        return self._best_of(self._values()[0])

    def _best_of(self, known: dict[Path, float]) -> Path | None:
        return (min if self._lowest else max)(known, key=lambda folder: known[folder], default=None)

    def _values(self) -> tuple[dict[Path, float], dict[Path, DataError]]:
        """The metric of the checkpoints that have it, and those whose state cannot be read; nothing where no metric is asked for."""
        known: dict[Path, float] = {}
        unread: dict[Path, DataError] = {}
        for folder in folders.found(self._run_dir) if self._metric is not None else []:
            try:
                value = folders.read_state(folder).get("metrics", {}).get(self._metric)
            except DataError as error:
                unread[folder] = error
                continue
            if value is not None:
                known[folder] = value
        return known, unread

    def _collect(self, draft: Path, reports: Sequence[Path]) -> dict[str, Entry]:
        known: dict[str, Entry] = {}
        pause, longest = _POLL_S
        for report in reports:
            while not report.is_file():
                if self._cancelled.wait(pause):
                    raise ResourceError(self._reason)
                if not draft.is_dir():  # then no report can come
                    raise ResourceError(f"the folder {draft} was removed while the checkpoint was being written")
                pause = min(2 * pause, longest)
            found = json.loads(report.read_text())
            report.unlink()
            if found["error"] is not None:
                raise ResourceError(found["error"])
            # Whoever writes has the path without its "..": runs/../mine is mine.
            known |= {Path(name).relative_to(os.path.abspath(draft)).as_posix(): entry for name, entry in found["files"].items()}
        return known


def write_report(file: Path, files: dict[str, Any], error: str | None) -> None:
    """Say that the files (absolute path -> manifest entry) of one who writes are done, or why they are not."""
    draft = file.with_suffix(".tmp")
    draft.write_text(json.dumps({"files": files, "error": error}))
    draft.rename(file)


def is_write_failure(error: Exception) -> bool:
    """Whether the system refused to write. Libraries in Rust (tokenizers) raise what the system said as a bare Exception."""
    return isinstance(error, OSError) or "(os error " in str(error)


def describe_failure(error: Exception) -> str:
    """One line on why something was not written."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for {error.filename or 'it'} ({error.strerror}); free some, or set trainer.max_ckpt_to_keep"
    if f"(os error {errno.ENOSPC})" in str(error):
        return f"no space left ({error}); free some, or set trainer.max_ckpt_to_keep"
    return str(error) if isinstance(error, ResourceError) else repr(error)
