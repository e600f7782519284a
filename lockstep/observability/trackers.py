"""Where metrics go: always `<run_dir>/metrics.jsonl`, and the dashboards the user asked for.

A dashboard that cannot start ends the run before it begins; one that fails later is reported once and dropped, and the
run goes on.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import ConfigError, MissingExtra

KNOWN_TRACKERS = ("console", "file", "tensorboard", "wandb")


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown name and MissingExtra for a package that is not installed, without starting anything."""
    for name in names:
        if name not in KNOWN_TRACKERS:
            raise ConfigError(f"trainer.logger names {name!r}, which is not known; choose some of: {', '.join(KNOWN_TRACKERS)}")
        if name in _STARTS:
            _starter(name)


class Tracker(Protocol):
    """One destination of metrics. Both methods may raise; `Tracking` reports it."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step."""

    def finish(self, exit_code: int) -> None:
        """Write what is pending and close; `exit_code` is 0 for a run that ended well."""


class Tracking:
    """Sends the metrics of each step to every tracker. `with` finishes it, with exit code 1 after an exception.

    `names` are those of `trainer.logger`:

    ```text
    console      nothing here (the display is separate)
    file         <run_dir>/metrics.jsonl, which is written in any case
    tensorboard  <run_dir>/tensorboard
    wandb        Weights & Biases, project `project_name`, run `experiment_name`
    ```

    `resume_step` is the step of the checkpoint that the run continues from: what was logged after it is dropped, so
    each step is there once. With None the run is new, and an older metrics.jsonl is kept as metrics.<n>.jsonl.

    Raises ConfigError on an unknown name, MissingExtra when a tracker's package is not installed, and whatever a
    tracker raises that cannot start.
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
    ) -> None:
        check_trackers(names)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._finished = False
        self._trackers: dict[str, Tracker] = {}
        try:
            if "tensorboard" in names:
                self._trackers["tensorboard"] = _TensorBoard(run_dir / "tensorboard", config, resume_step)
            if "wandb" in names:
                self._trackers["wandb"] = _Wandb(project_name, experiment_name, run_dir, config, resume_step)
            # Last, so that a start that fails leaves the metrics of the run before it where they are.
            self._trackers["file"] = _JsonLines(run_dir / "metrics.jsonl", resume_step)
        except BaseException:
            self.finish(exit_code=1)
            raise

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of one step. A tracker that raises is reported by a warning and gets nothing more."""
        if self._finished:
            raise RuntimeError(f"log() of step {step} after finish(): its metrics would be lost")
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(metrics, step)
            except Exception as error:
                del self._trackers[name]
                warnings.warn(
                    f"tracker {name!r} failed at step {step} and is dropped, the run goes on: {error!r}",
                    stacklevel=2,
                )

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


class _JsonLines:
    """One line a step: {"step": n, "time": unix seconds, ...metrics}.

    The file is strict JSON: a number that is not finite is written as "nan", "inf" or "-inf".
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        if path.exists():
            if resume_step is None:
                path.rename(_free_name(path))
            else:
                _drop_steps_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        record = {"step": step, "time": time.time(), **{name: _strict(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def finish(self, exit_code: int) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, folder: Path, config: Mapping[str, Any], resume_step: int | None) -> None:
        # Older event files in the folder: TensorBoard hides their points from this step on.
        first_step = 0 if resume_step is None else resume_step + 1
        self._writer = _starter("tensorboard")(str(folder), purge_step=first_step)
        self._writer.add_text("config", f"<pre>{json.dumps(dict(config), indent=2, default=str)}</pre>", resume_step or 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, exit_code: int) -> None:
        self._writer.close()


class _Wandb:
    def __init__(
        self, project_name: str, experiment_name: str, run_dir: Path, config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        # A resumed run continues the same curve. Steps it repeats are there already: wandb ignores them.
        id_file = run_dir / "wandb_run_id.txt"
        run_id = id_file.read_text().strip() if resume_step is not None and id_file.exists() else None
        self._run = _starter("wandb")(
            project=project_name, name=experiment_name, dir=str(run_dir), config=dict(config), id=run_id, resume="allow"
        )
        id_file.write_text(f"{self._run.id}\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


_STARTS = {"tensorboard": ("torch.utils.tensorboard", "SummaryWriter"), "wandb": ("wandb", "init")}
"""Tracker, which is its package -> the module and the name in it that starts it."""


def _starter(tracker: str) -> Any:
    module, name = _STARTS[tracker]
    try:
        importlib.import_module(tracker)  # torch's module of tensorboard is there without it
        return getattr(importlib.import_module(module), name)
    except (
        ImportError,
        AttributeError,
    ) as error:  # a folder of that name, as wandb leaves behind, can be imported but has no such name
        raise MissingExtra(f"the {tracker} logger", tracker, "logging") from error


def _strict(value: float) -> float | str:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else str(number)


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in count(1))
    return next(name for name in names if not name.exists())


def _drop_steps_after(path: Path, last_step: int) -> None:
    """Keep only the steps up to `last_step`, atomically. A line that a crash cut short is dropped with a warning."""
    unreadable = []
    rewritten = path.with_name(f"{path.name}.tmp")
    with path.open(encoding="utf-8", errors="replace") as old, rewritten.open("w", encoding="utf-8") as new:
        for number, line in enumerate(old, start=1):
            if (step := _step_of(line)) is None:
                unreadable.append(number)
            elif step <= last_step:
                new.write(line.rstrip("\n") + "\n")
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
