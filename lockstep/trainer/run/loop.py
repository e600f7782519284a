"""Run: everything around the steps of a training, for every recipe.

```text
open the folder -> resume -> (validate) -> step -> validate and begin to save when due -> log -> publish -> step ... -> FitResult
```

Metrics of a step are on disk before its checkpoint gets its name, and a resume drops lines after the checkpoint: whenever the run is
killed, every step is logged once.

A recipe is a subclass that defines a step, a validation and a checkpoint.
"""

import dataclasses
import gc
import json
import os
import shlex
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint import folders
from lockstep.checkpoint.lock import FolderLock
from lockstep.checkpoint.manifest import check_manifest
from lockstep.checkpoint.saver import Saver, is_write_failure
from lockstep.config.identity import check_resumable, kept_values, redacted
from lockstep.config.load import to_yaml
from lockstep.config.trainer import RunConfig, spread_rows
from lockstep.data.schedule import PromptSchedule, batch_at
from lockstep.errors import (
    ConfigError,
    DataError,
    NumericalError,
    ResourceError,
    Stopped,
    WorkerDied,
    WorkerTimeout,
    is_nonfinite,
    is_out_of_memory,
)
from lockstep.observability.alarms import Alarms, shown
from lockstep.observability.display import Display
from lockstep.observability.spans import StageTimer, progress
from lockstep.observability.trackers import Tracking, free_name
from lockstep.trainer.run.stop import StopSignals
from lockstep.utils.garbage import frozen_objects, unfreeze_objects

FIRST = "val-first/"
"""Prefix of validation metrics on the rows of the validation before the first step, if that was not on all rows."""
MOST_STEPS_WITHOUT_UPDATE = 3
"""Steps in a row in which a model has no update (trainer.on_nonfinite=skip) until the run ends with an error."""


@dataclass(frozen=True)
class FitResult:
    """The result of a run."""

    steps: int
    """Steps done in all, including those before a resume."""
    validation_before: dict[str, float]
    """Metrics of the validation before the first step, also from before a resume; empty without one."""
    last_validation: dict[str, float]
    """Metrics of the last validation; empty without one."""
    validation_after: dict[str, float]
    """Metrics of the last validation on the rows of `validation_before`; empty if the two cannot be compared."""
    checkpoint: Path | None
    """The newest checkpoint."""
    best_checkpoint: Path | None
    """The best one by trainer.best_metric."""
    metrics_file: Path
    """The metrics of every step."""
    alarms: tuple[str, ...] = ()
    """Alarms of the run (observability/alarms.py)."""


class Run(ABC):
    """A training run in the folder `config.trainer.run_dir`. `fit` trains.

    `config` is the recipe's whole configuration, a dataclass with the section `trainer`. `total_steps` may be lowered to the present step,
    which is then the last one and is saved as such.
    """

    config: Any
    section: RunConfig

    def __init__(self, config: Any, total_steps: int, display: Display, has_validation: bool) -> None:
        self.config = config
        self.section = config.trainer
        self.total_steps = total_steps
        self.has_validation = has_validation
        self.display = display
        self.timer = StageTimer()
        self.global_steps = 0
        """Steps done so far. A step that raises does not count."""
        self.validation_before: dict[str, float] = {}
        self.last_validation: dict[str, float] = {}
        self._rows_before: dict[str, list[int]] = {}
        """Name of a set of validation rows -> how many were validated before the first step, and of how many."""
        self._num_rows: dict[str, int] = {}
        """Name of a set of validation rows -> how many it has now."""
        self.alarms = Alarms(self.section.run_dir)
        self._is_alarmed = False
        self._step_began: float | None = None
        """Start of the present step, on the monotonic clock; None between steps."""
        self._step_s: float | None = None
        """Duration of the last step."""
        self.num_restarts = 0
        self.left_out: list[int] = []
        """Numbers, from 0 and rising, of the batches that are skipped (trainer.on_nonfinite=rollback)."""
        self._position_before = 0
        self._steps_without_update = 0
        self._unsaved: dict[str, float] | None = None
        """Metrics of the last step, if it was not saved and could have been."""
        self._lock: FolderLock | None = None
        self._from: tuple[Path, dict[str, Any]] | None = None
        """The checkpoint to resume from, and its state."""
        self._saver = Saver(
            self.section.run_dir,
            keep=self.section.max_ckpt_to_keep,
            metric=self.section.best_metric,
            lowest=self.section.best_is_lowest,
            stops=self.section.on_save_failure == "stop",
            say=display.message,
        )

    # -- what a recipe defines ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _step(self) -> dict[str, float]:
        """Do step number `global_steps + 1`. Return its metrics."""

    def _validate(self) -> dict[str, float]:
        """Return metrics of the present model. Called only if `has_validation`."""
        return {}

    def _examine(self, metrics: dict[str, float]) -> list[dict[str, Any]]:
        """Called once after each step. May add to its metrics. Return some samples of the model (prompt, response, score)."""
        return []

    def _state(self) -> dict[str, Any]:
        """Return what a resume needs beside the models and `global_steps`, as JSON."""
        return {}

    @abstractmethod
    def _save(self, folder: Path) -> Sequence[Path] | None:
        """Write the present models into `folder` (absolute).

        If workers write in the background, return the files, one per worker, in which they will report the end
        (checkpoint/saver.py::write_report).
        """

    def _finish_save(self) -> Sequence[str]:
        """Wait until all workers have written. Return their errors. Raise if a worker is lost."""
        return ()

    @abstractmethod
    def _load(self, folder: Path, state: dict[str, Any]) -> None:
        """Load the models in `folder`, and restore `state`, which `_state` returned when they were saved."""

    def _position(self) -> int:
        """Return the number of batches taken so far; the next one has the number `batch_at(_position(), left_out)`."""
        return self.global_steps

    def training_data(self) -> tuple[Any, PromptSchedule]:
        """Return the training rows and their order."""
        raise NotImplementedError("this recipe reads no files")

    def _describe(self) -> str:
        """Return a description of a step, printed at the start."""
        return ""

    def _restart(self) -> None:
        """End the remaining workers and start new ones with the initial models. Reset the recipe's own state, too."""
        raise NotImplementedError("this recipe has no workers that could be lost")

    # -- the run -----------------------------------------------------------------------------------------------------------

    def open_folder(self) -> None:
        """Take the run's folder, and find the checkpoint to resume from. Call it before models are loaded.

        Raise ResourceError if another run holds the folder, ConfigError if the folder has checkpoints that this run does not resume from or
        the configuration differs from the checkpoint's, and DataError if the checkpoint is damaged.
        """
        if self._lock is None:
            self._lock = FolderLock(self.section.run_dir)
            try:
                folders.remove_leftovers(self.section.run_dir)
                is_own = self.section.resume_mode == "auto" or self.num_restarts > 0
                self._from = find_checkpoint(self.config, self.section, is_own, self.display.message)
                folders.repair_tracker(self.section.run_dir)
            except BaseException:
                self.close_folder()
                raise

    def close_folder(self) -> None:
        """Release the folder for other runs. Cancel a save that is not finished. May be called again."""
        self._saver.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def fit(self) -> FitResult:
        """Train until the last step, resuming from the run's newest checkpoint. Validate and save when due.

        SIGTERM and SIGINT end the run after the present step, with a checkpoint, and raise Stopped. If a worker is lost, resume from the
        newest checkpoint with new workers, `trainer.max_restarts` times.
        """
        with ExitStack() as waits:
            while True:
                stop = StopSignals(self.section.stop_deadline_s, self._ended, self._acknowledge)
                self.open_folder()
                try:
                    with stop:
                        self._resume()
                        self.alarms.resume(self._metrics_file, self.global_steps)
                        (self.section.run_dir / "config.yaml").write_text(to_yaml(self.config))
                        incomplete = self._line_to_complete()
                        with self._tracking(incomplete is not None) as tracking, self.display, frozen_objects():
                            self._begin(incomplete, tracking)
                            while self._has_more_steps() and not stop.asked:
                                self._begin_step()
                                metrics = self._step()
                                self._end_step()
                                self._after_step(metrics, tracking, stop)
                            if stop.asked and self._unsaved is not None:  # the signal came after the decision to save nothing
                                self._publish(self._begin_save(self._unsaved), tracking)
                            self._end_save()
                    self._check_end(stop)
                    return self._result()
                except Exception as error:
                    self._keep_step(error)
                    if not self._may_restart_after(error, stop):
                        raise
                finally:
                    self.close_folder()
                waits.enter_context(self.display.waits())
                self._reset()

    def _begin(self, incomplete: dict[str, Any] | None, tracking: Tracking) -> None:
        """Show what will be done, and validate before the first step. `incomplete`: the logged metrics of the checkpoint's step, to which
        a validation is to be added."""
        section = self.section
        self._drop_repeated_failures()
        self._introduce()
        is_first = section.val_before_train and not self.global_steps
        if self.has_validation and (section.val_only or incomplete or is_first):
            metrics = self._timed_validation() | {"timing_s/testing": self.timer.seconds["testing"]}
            tracking.log((incomplete or {}) | metrics, self.global_steps)
            self.alarms.step(self.global_steps, metrics, [])
            self.display.step(self.global_steps, metrics)

    def _has_more_steps(self) -> bool:
        return self.global_steps < self.total_steps and not self.section.val_only and not self._is_alarmed

    def _begin_step(self) -> None:
        self.timer.reset()
        self._position_before = self._position()
        self._step_began = time.monotonic()

    def _end_step(self) -> None:
        assert self._step_began is not None
        self.global_steps += 1
        self._step_s = time.monotonic() - self._step_began
        self._step_began = None

    def _after_step(self, metrics: dict[str, float], tracking: Tracking, stop: StopSignals) -> None:
        """Validate if due, check alarms, begin to save; then log, publish the checkpoint, and show the step."""
        section = self.section
        seconds = self.timer.seconds
        samples = self._examine(metrics)
        if section.on_nonfinite == "skip":
            self._check_skipped_updates(metrics)
        if self.left_out:
            metrics["training/left_out_batches"] = len(self.left_out)
        if self._validates_after(self.global_steps) and not stop.asked:
            metrics |= self._timed_validation()
        if section.best_metric is not None:
            check_best(section, metrics, self.validation_before, self.global_steps, self.display.message)
        alarms = self.alarms.step(self.global_steps, metrics, samples)
        self._is_alarmed = bool(alarms) and section.on_alarm == "stop"
        is_last = bool(stop.asked) or self._is_alarmed
        saves = self.is_due(section.save_freq, self.global_steps) or (is_last and section.save_freq != 0)
        self._unsaved = metrics if section.save_freq != 0 and not saves else None
        draft = self._begin_save(metrics) if saves else None
        metrics |= {f"timing_s/{name}": seconds[name] for name in seconds if name in ("testing", "save_checkpoint")}
        tracking.log(metrics, self.global_steps)
        if self.global_steps == 1 or alarms or "testing" in seconds or "save_checkpoint" in seconds:
            tracking.samples(samples, self.global_steps)
        self._publish(draft, tracking)
        self.display.step(self.global_steps, metrics)
        if alarms:
            self.display.message(shown(alarms, samples))
        self._saver.check()

    def _check_skipped_updates(self, metrics: Mapping[str, float]) -> None:
        """Warn of skipped updates (trainer.on_nonfinite=skip). Raise NumericalError if a model had none in too many steps in a row."""
        shares = {name.split("/")[0]: share for name, share in metrics.items() if name.endswith("/skipped_updates") and share}
        for model, share in shares.items():
            self.display.message(
                f"warning: step {self.global_steps}: {share:.0%} of the updates ({model}) gave numbers that are not finite and were left "
                "out (trainer.on_nonfinite=skip)"
            )
        self._steps_without_update = self._steps_without_update + 1 if 1.0 in shares.values() else 0
        if self._steps_without_update == MOST_STEPS_WITHOUT_UPDATE:
            raise NumericalError(
                f"no update of a model in {MOST_STEPS_WITHOUT_UPDATE} steps in a row gave finite numbers; look at the data and the "
                "weights, or lower the learning rate"
            )

    def _check_end(self, stop: StopSignals) -> None:
        """Raise Stopped if a signal ended the run before its last step and validation, and Alarmed if an alarm did."""
        is_validated = "testing" in self.timer.seconds or not self._validates_after(self.global_steps)
        is_complete = self.global_steps >= self.total_steps and is_validated
        if stop.asked and not is_complete:
            raise Stopped(stop.asked, self._ended(stop.asked.name))
        if self._is_alarmed:
            self.alarms.stop(self._ended)

    def is_due(self, frequency: int, step: int) -> bool:
        """At every `frequency`-th step and at the last one; -1 at the last only, 0 never."""
        return frequency != 0 and (step == self.total_steps or (frequency > 0 and step % frequency == 0))

    def _validates_after(self, step: int) -> bool:
        return self.has_validation and self.is_due(self.section.test_freq, step)

    def _line_to_complete(self) -> dict[str, Any] | None:
        """Return the logged metrics of the checkpoint's step if a validation is to be added to them: because it was due, or because of
        trainer.val_only."""
        line = _logged_metrics(self._metrics_file, self.global_steps)
        if line is None or not self.has_validation:
            return None
        is_missing = self._validates_after(self.global_steps) and "timing_s/testing" not in line
        return line if is_missing or self.section.val_only else None

    @property
    def _metrics_file(self) -> Path:
        return self.section.run_dir / "metrics.jsonl"

    def _result(self) -> FitResult:
        return FitResult(
            steps=self.global_steps,
            validation_before=self.validation_before,
            last_validation=self.last_validation,
            validation_after=self._validation_after(),
            checkpoint=folders.newest(self.section.run_dir),
            best_checkpoint=self._saver.best(),
            metrics_file=self._metrics_file,
            alarms=tuple(map(str, self.alarms.sounded)),
        )

    def _ended(self, why: str) -> str:
        run_dir = self.section.run_dir
        newest = folders.newest(run_dir)
        saved = f"the newest checkpoint is {newest}; the same command goes on from it" if newest else "there is no checkpoint"
        text = f"{why}: ended after step {self.global_steps} of {self.total_steps}; {saved}"
        report = f"\n  a report to open in a browser: lockstep report {shlex.quote(str(run_dir))}"
        return text + (report if self.global_steps and self.section.save_freq else "")

    def _acknowledge(self, number: signal.Signals) -> None:
        """Tell the user the effect of the first signal, how long it takes, and the effect of a second one."""
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        saves = "" if self.section.save_freq == 0 else " and saving it"
        began = self._step_began
        limit = f"at most {self.section.stop_deadline_s:g} s (trainer.stop_deadline_s)"
        if began is None and not self.global_steps:
            doing = "ending after what is being done now"
            lost = ""
        elif began is None:
            doing = f"finishing step {self.global_steps} of {self.total_steps}{saves}"
            lost = " and may lose this step"
        else:
            doing = f"finishing step {self.global_steps + 1} of {self.total_steps}{saves}"
            lost = " and loses this step"
            if self._step_s is not None:
                limit = f"about {max(self._step_s - (time.monotonic() - began), 1.0):.0f} s, {limit}"
        again = "press it again" if number == signal.SIGINT else "send it again"
        self.display.message(f"{name}: {doing}, {limit}; {again} to stop now, which ends the run at once{lost}")

    def _tracking(self, logs_again: bool) -> Tracking:
        return Tracking(
            self.section.logger,
            project_name=self.section.project_name,
            experiment_name=self.section.experiment_name or self.section.run_dir.name,
            run_dir=self.section.run_dir,
            config=redacted(dataclasses.asdict(self.config)),
            resume_step=self.global_steps or None,
            logs_again=logs_again,
        )

    def _introduce(self) -> None:
        title = f"{self.section.project_name}/{self.section.experiment_name}"
        due: dict[str, Callable[[int], bool]] = {
            "testing": self._validates_after,
            "save_checkpoint": partial(self.is_due, self.section.save_freq),
        }
        self.display.start(self.total_steps, first_step=self.global_steps, title=title, due=due)
        self.display.message(self._describe())
        if self.global_steps >= self.total_steps:
            self.display.message(
                f"nothing to train: the checkpoint is at step {self.global_steps} of {self.total_steps}; raise "
                "trainer.total_training_steps to go on, or name a new run with trainer.experiment_name"
            )

    def _timed_validation(self) -> dict[str, float]:
        if not self.global_steps:
            self._rows_before.clear()
        with self.timer.stage("testing"):
            self.last_validation = self._validate()
        if not self.global_steps:
            shares = [count / num_rows for count, num_rows in self._rows_before.values()]
            if min(shares, default=1.0) < 1:
                self.last_validation["val-aux/share_of_rows"] = min(shares)
            self.validation_before = self.last_validation
        return self.last_validation

    def _validated_rows(self, name: str, num_rows: int, samples_per_row: int, samples_per_step: int) -> list[int]:
        """Return the rows of the set `name` for this validation: all, but before the first step trainer.val_before_train_samples."""
        self._num_rows[name] = num_rows
        rows = list(range(num_rows))
        if self.global_steps:
            return rows
        if not self.section.val_only:
            rows = self.section.first_validation_rows(num_rows, samples_per_row, samples_per_step)
        self._rows_before[name] = [len(rows), num_rows]
        if len(rows) < num_rows:
            self.display.message(
                f"the validation before the first step is on {len(rows)} of {num_rows} rows (trainer.val_before_train_samples=-1: all)"
            )
        return rows

    def _first_rows(self, name: str, num_rows: int) -> list[int] | None:
        """Return the rows of the set `name` in the validation before the first step; None if that was on all rows, or on other data."""
        count, before = self._rows_before.get(name, [0, 0])
        is_whole = all(one == all_rows for one, all_rows in self._rows_before.values())
        if not self.global_steps or before != num_rows or is_whole:
            return None
        return spread_rows(count, num_rows)

    def _validation_after(self) -> dict[str, float]:
        """Return metrics of the last validation on the rows of the first one; nothing if the data has changed."""
        last = self.last_validation
        is_other = any(self._num_rows.get(name) != num_rows for name, (_, num_rows) in self._rows_before.items())
        if not self.validation_before or not self.global_steps or is_other:
            return {}
        if "val-aux/share_of_rows" not in self.validation_before:
            return last
        return {name.removeprefix(FIRST): value for name, value in last.items() if name.startswith(FIRST)}

    # -- errors and restarts -----------------------------------------------------------------------------------------------

    def _keep_step(self, error: Exception) -> None:
        """Finish the last save, and write a repro file of a step whose numbers are not finite."""
        with suppress(Exception):  # the error of this step must not lose the checkpoint of the last one
            self._end_save()
        if is_nonfinite(error):
            from lockstep.trainer.run.capsule import keep_failed_step

            keep_failed_step(self, error)

    def _may_restart_after(self, error: Exception, stop: StopSignals) -> bool:
        """Return whether the run restarts from its newest checkpoint. Tell the user, and skip a batch whose numbers were not finite.

        Raise Stopped instead of a restart if the run was asked to stop: a signal to all processes of a job may end workers first.
        """
        is_lost = isinstance(error, WorkerDied | WorkerTimeout) or is_out_of_memory(error)
        rolls_back = is_nonfinite(error) and self.section.on_nonfinite == "rollback"
        if not (is_lost or rolls_back) or self.num_restarts >= self.section.max_restarts:
            return False
        if stop.asked:
            self.display.message(f"warning: {error}")
            raise Stopped(stop.asked, self._ended(stop.asked.name)) from error
        self.num_restarts += 1
        how = "new workers go on"
        if rolls_back:
            positions = range(self._position_before, max(self._position_before + 1, self._position()))
            batches = [batch_at(position, self.left_out) for position in positions]
            self.left_out[:] = sorted({*self.left_out, *batches})
            how = f"the run goes on without {'batch' if len(batches) == 1 else 'batches'} {', '.join(map(str, batches))}"
        self.display.message(
            f"warning: {error}\n{how} from the newest checkpoint: restart {self.num_restarts} of at most {self.section.max_restarts} "
            "(trainer.max_restarts)"
        )
        return True

    def _reset(self) -> None:
        """Return to the state before the first step, with new workers."""
        self.global_steps = 0
        self.validation_before = {}
        self.last_validation = {}
        self._rows_before = {}
        self._unsaved = None
        self._is_alarmed = False
        unfreeze_objects()  # the objects of the lost workers are garbage now
        gc.collect()
        deadline = time.monotonic() + self.section.start_timeout_s
        while True:
            try:
                return self._restart()
            except ResourceError:  # memory of the lost workers may not be free yet
                if time.monotonic() >= deadline:
                    raise
                time.sleep(1.0)

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def _begin_save(self, metrics: dict[str, float]) -> tuple[Path, Sequence[Path]] | None:
        """Write the checkpoint of this step, or begin to. Return the draft and the reports that are still to come; None if it failed and
        trainer.on_save_failure allows that."""
        with self.timer.stage("save_checkpoint"):
            self._wait_for_save()
            try:
                draft = self._saver.begin(self.global_steps)
                # Workers may run in another folder than the driver.
                reports = self._save(Path(os.path.abspath(draft))) or ()
                folders.write_state(draft, self._run_state(metrics) | self._state())
                return draft, reports
            except Exception as error:
                if not is_write_failure(error):
                    raise
                self._saver.fail(error)
                return None

    def _publish(self, draft: tuple[Path, Sequence[Path]] | None, tracking: Tracking) -> None:
        """Make the draft a checkpoint, at once or when all workers have written; not if the step's metrics are not on disk."""
        if draft is not None and tracking.unwritten is not None:
            self._saver.fail(tracking.unwritten)
        elif draft is not None:
            self._saver.publish(*draft, durable=[self._metrics_file], waits=not self.section.save_in_background)

    def _wait_for_save(self) -> None:
        with progress("writing the checkpoint"):
            for error in self._finish_save():
                self._saver.cancel(error)  # the worker may not have been able to write its report
            self._saver.wait()

    def _end_save(self) -> None:
        """Wait for the last save. Raise ResourceError if the save of the last step failed, whatever trainer.on_save_failure says."""
        self._wait_for_save()
        if self._saver.failed == self.global_steps:
            raise ResourceError(f"step {self.global_steps}, the last one, was not saved")

    def _run_state(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Return the part of trainer_state.json that every recipe has."""
        best = self.section.best_metric
        return {
            "global_steps": self.global_steps,
            "recipe": type(self.config).__name__,
            "config": kept_values(self.config),
            "validation_before": self.validation_before,
            "validation_before_rows": self._rows_before,
            "left_out": self.left_out,
            "reward_failures_bytes": self._failures_file.stat().st_size if self._failures_file.is_file() else 0,
            "metrics": {best: metrics[best]} if best is not None and best in metrics else {},
        }

    @property
    def _failures_file(self) -> Path:
        return self.section.run_dir / "reward_failures.jsonl"

    def _drop_repeated_failures(self) -> None:
        """Cut reward_failures.jsonl to its size at the checkpoint, because later steps are repeated. The file of an older run is renamed to
        reward_failures.N.jsonl, like its metrics."""
        file = self._failures_file
        if not file.is_file():
            return
        is_own = self._from is not None and self._from[0].resolve().parent == self.section.run_dir.resolve()
        if self._from is None or not is_own:
            file.rename(free_name(file))
            return
        size = self._from[1].get("reward_failures_bytes")
        if size is not None and size < file.stat().st_size:
            os.truncate(file, size)

    def _resume(self) -> None:
        """Load the checkpoint that `open_folder` found."""
        if self._from is None:
            return
        folder, state = self._from
        if folder.resolve().parent == self.section.run_dir.resolve():
            self._saver.prune()  # a killed run may not have done it
        self.global_steps = state["global_steps"]
        self.validation_before = state.get("validation_before", {})
        self._rows_before = dict(state.get("validation_before_rows", {}))
        self.left_out[:] = sorted({*self.left_out, *state["left_out"]})
        self.display.message(f"resuming from {folder} at step {self.global_steps}")
        try:
            with progress("loading the checkpoint"):
                self._load(Path(os.path.abspath(folder)), state)
        except KeyError as error:
            raise DataError(f"{folder / folders.STATE} lacks {error}; was it written by another version?") from error


def find_checkpoint(
    config: Any, section: RunConfig, is_own: bool, say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that `section` names, or (`is_own`) the newest whole one in the run's folder, with its state.

    Raise ConfigError if the folder has checkpoints that the run does not resume from or the configuration differs from the checkpoint's,
    and DataError if the checkpoint is damaged.
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
    """Raise ConfigError if the folder has checkpoints other than `start` and older ones."""
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


def check_best(
    section: RunConfig, metrics: Mapping[str, float], before: Mapping[str, float], step: int, say: Callable[[str], None]
) -> None:
    """Raise ConfigError if trainer.best_metric is neither among the metrics of the first step nor of the validation `before` it.

    In a later step that is validated, warn instead: an error would lose the run's work.
    """
    best = section.best_metric
    assert best is not None
    first = 1 + getattr(section, "critic_warmup", 0)  # until then the actor has no metrics
    covers_all_rows = "val-aux/share_of_rows" not in before  # some rows need not have every data source
    known = {**before, **metrics} if step == first and covers_all_rows else metrics
    is_validated = any(name.startswith("val") for name in known)
    may_be_missing = not is_validated and (best.startswith("val") or step != first)
    if step < first or best in known or may_be_missing:
        return
    text = f"trainer.best_metric={best} is not among the metrics: {', '.join(sorted(known))}"
    if step == 1:
        raise ConfigError(text)
    say(f"warning: {text}; no checkpoint is kept as the best")


def _logged_metrics(metrics_file: Path, step: int) -> dict[str, Any] | None:
    """Return the metrics of a step in the run's file; None for step 0 and for a missing step."""
    if not step or not metrics_file.is_file():
        return None
    for line in metrics_file.read_text(errors="replace").splitlines():
        with suppress(ValueError):  # a line that a crash cut
            row = json.loads(line)
            if isinstance(row, dict) and row.get("step") == step:
                return {name: value for name, value in row.items() if name not in ("step", "time")}
    return None
