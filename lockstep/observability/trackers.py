"""Where metrics go: always `<run_dir>/metrics.jsonl`, and the dashboards the user asked for.

A dashboard that cannot start ends the run before it begins; one that fails later is reported once and dropped, and the
run goes on. The file is never dropped: lines that it does not take, on a full disk, are written with later ones.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import ConfigError, ResourceError
from lockstep.observability.dashboards import DASHBOARDS, Samples, check_installed
from lockstep.utils.files import load_reference

KNOWN_TRACKERS = ("console", "file", *DASHBOARDS)


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown name and MissingExtra for a package that is not installed, without starting anything."""
    for name in names:
        if name in DASHBOARDS:
            check_installed(name)
        elif name not in KNOWN_TRACKERS and not callable(load_reference(name)):
            known = ", ".join(KNOWN_TRACKERS)
            raise ConfigError(
                f"trainer.logger names {name!r}, which is not known; choose some of: {known}, or file.py:name of your own"
            )


class Tracker(Protocol):
    """One destination of metrics. Its methods may raise; `Tracking` reports it.

    One of the user's own is made with the arguments project_name, experiment_name, run_dir, config and resume_step, by name.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step."""

    def samples(self, rows: Samples, step: int) -> None:
        """Show what the model wrote in some step. A tracker may do without this method."""

    def finish(self, exit_code: int) -> None:
        """Write what is pending and close; `exit_code` is 0 for a run that ended well."""


class Tracking:
    """Sends the metrics of each step to every tracker. `with` finishes it, with exit code 1 after an exception.

    `names` are those of `trainer.logger`:

    ```text
    console      nothing here (the display is separate)
    file         <run_dir>/metrics.jsonl, which is written in any case
    tensorboard, wandb, mlflow, swanlab, trackio   see dashboards.py
    file.py:name                                   a Tracker of the user's own
    ```

    `resume_step` is the step of the checkpoint that the run continues from: what was logged after it is dropped, so
    each step is there once. With None the run is new, and an older metrics.jsonl is kept as metrics.<n>.jsonl. `logs_again`: what is
    logged first are the metrics of that step again, in the place of those that are there.

    Raises ConfigError on an unknown name, MissingExtra when a tracker's package is not installed, ResourceError for a tracker that
    cannot start, and OSError where metrics.jsonl cannot be written.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        project_name: str,
        experiment_name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        resume_step: int | None = None,
        logs_again: bool = False,
    ) -> None:
        check_trackers(names)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._finished = False
        self._trackers: dict[str, Any] = {}
        try:
            own = {"project_name": project_name, "experiment_name": experiment_name, "run_dir": run_dir, "config": config}
            before = resume_step - 1 if resume_step is not None and logs_again else resume_step
            for name in dict.fromkeys(names):
                if name not in ("console", "file"):
                    self._trackers[name] = _start(name, **own, resume_step=before)
            # Last, so that a start that fails leaves the metrics of the run before it where they are.
            self._file = self._trackers["file"] = _JsonLines(run_dir / "metrics.jsonl", resume_step, logs_again)
        except BaseException:
            self.finish(exit_code=1)
            raise

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step. A tracker that raises is reported by a warning and gets nothing more, unless it is the file."""
        if self._finished:
            raise RuntimeError(f"log() of step {step} after finish(): its metrics would be lost")
        self._send(step, lambda tracker: tracker.log(metrics, step))

    @property
    def unwritten(self) -> OSError | None:
        """Why metrics.jsonl lacks lines that were logged, where it does."""
        return self._file.error

    def samples(self, rows: Samples, step: int) -> None:
        """Send a table of what the model wrote, to those who show one."""
        if rows:
            self._send(step, lambda tracker: tracker.samples(rows, step) if hasattr(tracker, "samples") else None)

    def _send(self, step: int, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                if tracker is self._file:
                    text = f"metrics.jsonl was not written at step {step}; its lines are written as soon as they can be: {error!r}"
                else:
                    text = f"tracker {name!r} failed at step {step} and is dropped, the run goes on: {error!r}"
                    del self._trackers[name]
                warnings.warn(text, stacklevel=3)

    def finish(self, exit_code: int = 0) -> None:
        """Close every tracker; a second call does nothing. A tracker that raises is reported by a warning."""
        self._finished = True
        while self._trackers:
            name, tracker = self._trackers.popitem()
            try:
                tracker.finish(exit_code)
            except Exception as error:
                warnings.warn(f"tracker {name!r} did not finish, metrics may be lost: {error!r}", stacklevel=2)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.finish(exit_code=0 if kind is None else 1)


def _start(name: str, **arguments: Any) -> Tracker:
    try:
        tracker: Tracker = (DASHBOARDS.get(name) or load_reference(name))(**arguments)
    except Exception as error:  # a key is missing, nobody is there: every package has errors of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ResourceError(f"trainer.logger={name} cannot start: {reason}; mend it, or leave it out of trainer.logger") from error
    return tracker


class _JsonLines:
    """One line per step: {"step": n, "time": unix seconds, ...metrics}.

    The file is strict JSON: a number that is not finite is written as "nan", "inf" or "-inf".
    """

    def __init__(self, path: Path, resume_step: int | None, logs_again: bool) -> None:
        self._path = path
        self._replaced = resume_step if logs_again else None
        self._unwritten = b""
        self.error: OSError | None = None
        """Why the last lines are not in the file, where they are not."""
        if path.exists():
            if resume_step is None:
                path.rename(free_name(path))
            else:
                _drop_steps_after(path, resume_step)
        path.open("ab").close()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        record = {"step": step, "time": time.time(), **{name: _strict(value) for name, value in metrics.items()}}
        self._unwritten += f"{json.dumps(record, allow_nan=False)}\n".encode()
        self._write()

    def samples(self, rows: Samples, step: int) -> None:
        """They are no metrics."""

    def finish(self, exit_code: int) -> None:
        self._write()

    def _write(self) -> None:
        """Write the lines that are not in the file yet. One that was cut short is gone on with where it was cut."""
        try:
            if self._replaced is not None and self._unwritten:
                _drop_steps_after(self._path, self._replaced - 1, self._unwritten.decode())
                self._replaced = None
                self._unwritten = b""
            with self._path.open("ab", buffering=0) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
            self.error = None
        except OSError as error:
            self.error = error
            raise


def _strict(value: float) -> float | str:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else str(number)


def free_name(path: Path) -> Path:
    """The first of NAME.1.jsonl, NAME.2.jsonl, ... that is not taken."""
    names = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in count(1))
    return next(name for name in names if not name.exists())


def _drop_steps_after(path: Path, last_step: int, more: str = "") -> None:
    """Keep only the steps up to `last_step`, and add lines, atomically. A line that a crash cut short is dropped with a warning."""
    unreadable = []
    rewritten = path.with_name(f"{path.name}.tmp")
    with path.open(encoding="utf-8", errors="replace") as old, rewritten.open("w", encoding="utf-8") as new:
        for number, line in enumerate(old, start=1):
            if (step := _step_of(line)) is None:
                unreadable.append(number)
            elif step <= last_step:
                new.write(line.rstrip("\n") + "\n")
        new.write(more)
        new.flush()
        os.fsync(new.fileno())
    os.replace(rewritten, path)
    if unreadable:
        warnings.warn(f"{path}: dropped lines {unreadable}, which a crash left unreadable", stacklevel=2)


def _step_of(line: str) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, LookupError):
        return None
    return step if isinstance(step, int) else None
