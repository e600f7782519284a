"""Run: everything around the steps of a training, once for every recipe.

```text
open the folder -> resume -> (validate) -> step -> validate and begin to save when due -> log -> publish -> step ... -> FitResult
```

Metrics of a step are on disk before its checkpoint has its name, and what was logged after a checkpoint is dropped on resume: whenever the
run is killed, every step is there once.

A recipe is a subclass: it says what a step, a validation and a checkpoint are. What is trained, and on what, is not known here.
"""

import dataclasses
import gc
import os
import shlex
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint import folders
from lockstep.checkpoint.best import check_best
from lockstep.checkpoint.lock import FolderLock
from lockstep.checkpoint.saver import Saver, is_write_failure
from lockstep.config.identity import kept_values, redacted
from lockstep.config.load import to_yaml
from lockstep.config.trainer import RunConfig, spread_rows
from lockstep.data.schedule import PromptSchedule, batch_at
from lockstep.errors import DataError, ResourceError, Stopped, WorkerDied, WorkerTimeout, is_nonfinite, is_out_of_memory
from lockstep.observability.alarms import Alarms, shown
from lockstep.observability.display import Display
from lockstep.observability.spans import StageTimer, progress
from lockstep.observability.trackers import Tracking, free_name
from lockstep.trainer.run.skipped import heed_skipped
from lockstep.trainer.run.start import find_checkpoint
from lockstep.trainer.run.stop import StopSignals, logged_metrics
from lockstep.utils.garbage import frozen_objects, unfreeze_objects

FIRST = "val-first/"
"""Before the names of validation metrics on the rows that were validated before the first step, where those were not all."""


@dataclass(frozen=True)
class FitResult:
    """What a run came to."""

    steps: int
    """Steps done in all, those before a resume included."""
    validation_before: dict[str, float]
    """Metrics of the validation before the first step, that of a run before a resume included; empty where there was none."""
    last_validation: dict[str, float]
    """Metrics of the last validation; empty where there was none."""
    validation_after: dict[str, float]
    """Metrics of the last validation on the rows of `validation_before`; empty where the two cannot be compared."""
    checkpoint: Path | None
    """The newest checkpoint."""
    best_checkpoint: Path | None
    """The best one by trainer.best_metric."""
    metrics_file: Path
    """Where every step's metrics are."""
    alarms: tuple[str, ...] = ()
    """What did not go as it should (observability/alarms.py)."""


class Run(ABC):
    """A training run in the folder `config.trainer.run_dir`. `fit` does it.

    `config` is the recipe's whole configuration, a dataclass with the section `trainer`. `total_steps` may be lowered to the step that
    is being done: it is then the last, and is saved as such.
    """

    config: Any
    section: RunConfig

    def __init__(self, config: Any, total_steps: int, display: Display, has_validation: bool) -> None:
        self.config, self.section = config, config.trainer
        self.total_steps, self.has_validation = total_steps, has_validation
        self.display = display
        self.timer = StageTimer()
        self.global_steps = 0
        """Steps done so far. A step that raises does not count."""
        self.validation_before: dict[str, float] = {}
        self.last_validation: dict[str, float] = {}
        self._rows_before: dict[str, list[int]] = {}
        """By name of a set of validation rows: how many of how many were validated before the first step."""
        self._num_rows: dict[str, int] = {}
        """By name of a set: how many rows it has now."""
        self.alarms, self._is_alarmed = Alarms(self.section.run_dir), False
        self._step_began: float | None = None
        """When the step that is being done began."""
        self._step_s: float | None = None
        """How long the last step took."""
        self.num_restarts = 0
        self.left_out: list[int] = []
        """Numbers, from 0 and rising, of the batches that are not trained on (trainer.on_nonfinite=rollback)."""
        self._position_before = self._steps_without = 0
        self._unsaved: dict[str, float] | None = None
        """Metrics of the last step, where that was not saved and could have been."""
        self._lock: FolderLock | None = None
        self._from: tuple[Path, dict[str, Any]] | None = None
        """The checkpoint to go on from, and its state."""
        self._saver = Saver(
            self.section.run_dir,
            keep=self.section.max_ckpt_to_keep,
            metric=self.section.best_metric,
            lowest=self.section.best_is_lowest,
            stops=self.section.on_save_failure == "stop",
            say=display.message,
        )

    # -- what a recipe gives -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _step(self) -> dict[str, float]:
        """Do step number `global_steps + 1`; returns its metrics."""

    def _validate(self) -> dict[str, float]:
        """Metrics of the model as it is. Called only where `has_validation`."""
        return {}

    def _examine(self, metrics: dict[str, float]) -> list[dict[str, Any]]:
        """Called once after each step: may add to its metrics, and returns some of what the model wrote (prompt, response, score)."""
        return []

    def _state(self) -> dict[str, Any]:
        """What is needed to go on, beside the models and `global_steps`, as JSON."""
        return {}

    @abstractmethod
    def _save(self, folder: Path) -> Sequence[Path] | None:
        """Write the models into `folder` (absolute), as they are now.

        A recipe whose workers go on writing returns the files, one for each who writes, in which they will say that they are done
        (checkpoint/saver.py::write_report).
        """

    def _finish_save(self) -> Sequence[str]:
        """Wait until all who write are done; returns what went wrong with them. Raises where one of them is gone."""
        return ()

    @abstractmethod
    def _load(self, folder: Path, state: dict[str, Any]) -> None:
        """Take over the models in `folder` and what `_state` returned when they were saved."""

    def _position(self) -> int:
        """Batches that were taken so far; the next one is number `batch_at(_position(), left_out)`."""
        return self.global_steps

    def training_data(self) -> tuple[Any, PromptSchedule]:
        """The rows that are trained on, and their order."""
        raise NotImplementedError("this recipe reads no files")

    def _describe(self) -> str:
        """What a step does, for the user to read at the start."""
        return ""

    def _restart(self) -> None:
        """End what is left of the workers and start new ones, which have the models of the beginning, as the recipe itself then has."""
        raise NotImplementedError("this recipe has no workers that could be lost")

    # -- what is the same for all ------------------------------------------------------------------------------------------

    def open_folder(self) -> None:
        """Take the run's folder, and find the checkpoint to go on from. Nothing is loaded; call it before models are.

        Raises ResourceError where another run is there, ConfigError where the folder has checkpoints that this run does not go on from or
        the configuration differs from the checkpoint's, and DataError where that is damaged.
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
        """Let other runs have the folder. A save that is not done by now is given up. May be called again."""
        self._saver.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def fit(self) -> FitResult:
        """Train until the last step, resuming where the run's folder says so. Validates and saves when due.

        SIGTERM and SIGINT end it after the step that is being done, with a checkpoint; then it raises Stopped. When a worker is lost it
        goes on from the newest checkpoint with new ones, `trainer.max_restarts` times.
        """
        config, stop = self.section, StopSignals(self.section.stop_deadline_s, self._ended, self._acknowledge)
        self.open_folder()
        try:
            with stop:
                self._resume()
                self.alarms.resume(self._metrics_file, self.global_steps)
                (config.run_dir / "config.yaml").write_text(to_yaml(self.config))
                again = self._line_to_complete()
                with self._tracking(again is not None) as tracking, self.display, frozen_objects():
                    self._drop_repeated_failures()
                    self._introduce()
                    if self.has_validation and (config.val_only or again or (config.val_before_train and not self.global_steps)):
                        metrics = self._timed_validation() | {"timing_s/testing": self.timer.seconds["testing"]}
                        tracking.log((again or {}) | metrics, self.global_steps)
                        self.alarms.step(self.global_steps, metrics, [])
                        self.display.step(self.global_steps, metrics)
                    while self.global_steps < self.total_steps and not (config.val_only or stop.asked or self._is_alarmed):
                        self.timer.reset()
                        self._position_before = self._position()
                        self._step_began = time.monotonic()
                        metrics = self._step()
                        self.global_steps += 1
                        self._step_s, self._step_began = time.monotonic() - self._step_began, None
                        self._after_step(metrics, tracking, stop)
                    if stop.asked and self._unsaved is not None:  # the signal came when it had been decided that nothing is saved
                        self._publish(self._begin_save(self._unsaved), tracking)
                    self._end_save()
            is_validated = "testing" in self.timer.seconds or not self._validates_after(self.global_steps)
            if stop.asked and not (self.global_steps >= self.total_steps and is_validated):
                raise Stopped(stop.asked, self._ended(stop.asked.name))
            if self._is_alarmed:
                self.alarms.stop(self._ended)
            return self._result()
        except Exception as error:
            with suppress(Exception):  # the error of this step must not lose the checkpoint of the last one
                self._end_save()
            if is_nonfinite(error):
                from lockstep.trainer.run.capsule import keep_failed_step

                keep_failed_step(self, error)
            if not self._begins_again_after(error, stop):
                raise
        finally:
            self.close_folder()
        with self.display.waits():
            self._begin_again()
            return self.fit()

    def _after_step(self, metrics: dict[str, float], tracking: Tracking, stop: StopSignals) -> None:
        """Validate where that is due, look for alarms, save; then log, publish what was saved, and show the step."""
        config, samples = self.section, self._examine(metrics)
        if config.on_nonfinite == "skip":
            self._steps_without = heed_skipped(metrics, self.global_steps, self._steps_without, self.display.message)
        if self.left_out:
            metrics["training/left_out_batches"] = len(self.left_out)
        if self._validates_after(self.global_steps) and not stop.asked:
            metrics |= self._timed_validation()
        if config.best_metric is not None:
            check_best(config, metrics, self.validation_before, self.global_steps, self.display.message)
        alarms = self.alarms.step(self.global_steps, metrics, samples)
        self._is_alarmed = bool(alarms) and config.on_alarm == "stop"
        is_last = bool(stop.asked) or self._is_alarmed
        saves = self.is_due(config.save_freq, self.global_steps) or (is_last and config.save_freq != 0)
        self._unsaved = metrics if config.save_freq != 0 and not saves else None
        draft = self._begin_save(metrics) if saves else None
        metrics |= {f"timing_s/{name}": s for name, s in self.timer.seconds.items() if name in ("testing", "save_checkpoint")}
        tracking.log(metrics, self.global_steps)
        if self.global_steps == 1 or alarms or {"testing", "save_checkpoint"} & set(self.timer.seconds):
            tracking.samples(samples, self.global_steps)
        self._publish(draft, tracking)
        self.display.step(self.global_steps, metrics)
        if alarms:
            self.display.message(shown(alarms, samples))
        self._saver.check()

    def is_due(self, frequency: int, step: int) -> bool:
        """At every `frequency`-th step and at the last one; -1 at the last only, 0 never."""
        return frequency != 0 and (step == self.total_steps or (frequency > 0 and step % frequency == 0))

    def _validates_after(self, step: int) -> bool:
        return self.has_validation and self.is_due(self.section.test_freq, step)

    def _line_to_complete(self) -> dict[str, Any] | None:
        """The metrics that the file has of the checkpoint's step, where a validation is to be added to them: one that is owed, or that of
        trainer.val_only."""
        line = logged_metrics(self._metrics_file, self.global_steps)
        if line is None or not self.has_validation:
            return None
        is_owed = self._validates_after(self.global_steps) and "timing_s/testing" not in line
        return line if is_owed or self.section.val_only else None

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
        """Tell the user what a first signal does, how long that takes, and what a second one does."""
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        saves = "" if self.section.save_freq == 0 else " and saving it"
        began = self._step_began
        limit = f"at most {self.section.stop_deadline_s:g} s (trainer.stop_deadline_s)"
        if began is None and not self.global_steps:
            doing, lost = "ending after what is being done now", ""
        elif began is None:
            doing, lost = f"finishing step {self.global_steps} of {self.total_steps}{saves}", " and may lose this step"
        else:
            doing, lost = f"finishing step {self.global_steps + 1} of {self.total_steps}{saves}", " and loses this step"
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
        """The rows, of the set of this name, that this validation is on: all, but before the first step those of
        trainer.val_before_train_samples."""
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
        """The rows of this set that the validation before the first step was on; None where that was on all rows, or of other data."""
        count, before = self._rows_before.get(name, [0, 0])
        is_whole = all(one == all_rows for one, all_rows in self._rows_before.values())
        if not self.global_steps or before != num_rows or is_whole:
            return None
        return spread_rows(count, num_rows)

    def _validation_after(self) -> dict[str, float]:
        """Metrics of the last validation on the rows of the one before the first step; none where the data are others now."""
        last = self.last_validation
        is_other = any(self._num_rows.get(name) != num_rows for name, (_, num_rows) in self._rows_before.items())
        if not self.validation_before or not self.global_steps or is_other:
            return {}
        if "val-aux/share_of_rows" not in self.validation_before:
            return last
        return {name.removeprefix(FIRST): value for name, value in last.items() if name.startswith(FIRST)}

    # -- lost workers ------------------------------------------------------------------------------------------------------

    def _begins_again_after(self, error: Exception, stop: StopSignals) -> bool:
        """Whether the run goes on from its newest checkpoint; says so, and leaves out a batch that gave numbers that are not finite.

        Raises Stopped where it would, but was asked to stop: a signal to all processes of a job may end workers first.
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

    def _begin_again(self) -> None:
        self.global_steps, self.validation_before, self.last_validation = 0, {}, {}
        self._unsaved, self._is_alarmed, self._rows_before = None, False, {}
        unfreeze_objects()  # what the lost ones held here is garbage now
        gc.collect()
        deadline = time.monotonic() + self.section.start_timeout_s
        while True:
            try:
                return self._restart()
            except ResourceError:  # what the lost ones held may not be free yet
                if time.monotonic() >= deadline:
                    raise
                time.sleep(1.0)

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def _begin_save(self, metrics: dict[str, float]) -> tuple[Path, Sequence[Path]] | None:
        """Write the checkpoint of this step, or begin to; returns the draft and who still writes. None where it failed and that is said."""
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
        """Make the draft a checkpoint, at once or when all who write are done; not where the step's metrics are not on disk."""
        if draft is not None and tracking.unwritten is not None:
            self._saver.fail(tracking.unwritten)
        elif draft is not None:
            self._saver.publish(*draft, durable=[self._metrics_file], waits=not self.section.save_in_background)

    def _wait_for_save(self) -> None:
        with progress("writing the checkpoint"):
            for error in self._finish_save():
                self._saver.cancel(error)  # the one who failed may not have been able to say so in the folder
            self._saver.wait()

    def _end_save(self) -> None:
        """Wait for the last save. Raises ResourceError where that of the last step failed, whatever trainer.on_save_failure says."""
        self._wait_for_save()
        if self._saver.failed == self.global_steps:
            raise ResourceError(f"step {self.global_steps}, the last one, was not saved")

    def _run_state(self, metrics: dict[str, float]) -> dict[str, Any]:
        """What is the same for every recipe in trainer_state.json."""
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
        """Cut reward_failures.jsonl to what it was at the checkpoint, since the steps after that are done again. That of an older run is
        kept as reward_failures.N.jsonl, as its metrics are."""
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
        """Take over the checkpoint that was found."""
        if self._from is None:
            return
        folder, state = self._from
        if folder.resolve().parent == self.section.run_dir.resolve():
            self._saver.prune()  # a run that was killed may not have come to it
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
