"""Run: everything around the steps of a training, once for every recipe.

```text
resume -> (validate) -> step -> validate and save when due -> log -> step ... -> FitResult
```

A recipe is a subclass: it says what a step, a validation and a checkpoint are. What is trained, and on what, is not known here.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import folders
from lockstep.config.load import to_yaml
from lockstep.config.trainer import RunConfig
from lockstep.observability.display import Display
from lockstep.observability.spans import StageTimer
from lockstep.observability.trackers import Tracking


@dataclass(frozen=True, slots=True)
class FitResult:
    """What a run came to."""

    steps: int
    """Steps done in all, those before a resume included."""
    first_validation: dict[str, float]
    """Metrics of the first validation in this run (empty without one)."""
    last_validation: dict[str, float]
    """Metrics of the last."""
    checkpoint: Path | None
    """The newest checkpoint."""
    metrics_file: Path
    """Where every step's metrics are."""


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
        self.timer = StageTimer(on_enter=display.stage if display.shows_stages else None)
        self.global_steps = 0
        """Steps done so far. A step that raises does not count."""

    # -- what a recipe gives -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _step(self) -> dict[str, float]:
        """Do step number `global_steps + 1`; returns its metrics."""

    def _validate(self) -> dict[str, float]:
        """Metrics of the model as it is. Called only where `has_validation`."""
        return {}

    def _state(self) -> dict[str, Any]:
        """What is needed to go on, beside the models and `global_steps`, as JSON."""
        return {}

    @abstractmethod
    def _save(self, folder: Path) -> None:
        """Write the models into `folder` (absolute)."""

    @abstractmethod
    def _load(self, folder: Path, state: dict[str, Any]) -> None:
        """Take over the models in `folder` and what `_state` returned when they were saved."""

    def _describe(self) -> str:
        """What a step does, for the user to read at the start."""
        return ""

    # -- what is the same for all ------------------------------------------------------------------------------------------

    def fit(self) -> FitResult:
        """Train until the last step, resuming where the run's folder says so. Validates and saves when due."""
        config = self.section
        self._resume()
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / "config.yaml").write_text(to_yaml(self.config))
        validations: list[dict[str, float]] = []
        with self._tracking() as tracking, self.display:
            self._introduce()
            if self.has_validation and (config.val_before_train or config.val_only):
                validations.append(self._timed_validation())
                tracking.log(validations[-1], self.global_steps)
                self.display.step(self.global_steps, validations[-1])
            while self.global_steps < self.total_steps and not config.val_only:
                self.timer.reset()
                metrics = self._step()
                self.global_steps += 1
                if self.has_validation and self.is_due(config.test_freq, self.global_steps):
                    validations.append(self._timed_validation())
                    metrics |= validations[-1]
                if self.is_due(config.save_freq, self.global_steps):
                    self._save_checkpoint()
                for name in ("testing", "save_checkpoint"):
                    if name in self.timer.seconds:
                        metrics[f"timing_s/{name}"] = self.timer.seconds[name]
                tracking.log(metrics, self.global_steps)
                self.display.step(self.global_steps, metrics)
        return FitResult(
            steps=self.global_steps,
            first_validation=validations[0] if validations else {},
            last_validation=validations[-1] if validations else {},
            checkpoint=folders.newest(config.run_dir),
            metrics_file=config.run_dir / "metrics.jsonl",
        )

    def is_due(self, frequency: int, step: int) -> bool:
        """At every `frequency`-th step and at the last one; -1 at the last only, 0 never."""
        return frequency != 0 and (step == self.total_steps or (frequency > 0 and step % frequency == 0))

    def _tracking(self) -> Tracking:
        return Tracking(
            self.section.logger,
            project_name=self.section.project_name,
            experiment_name=self.section.experiment_name,
            run_dir=self.section.run_dir,
            config=dataclasses.asdict(self.config),
            resume_step=self.global_steps or None,
        )

    def _introduce(self) -> None:
        title = f"{self.section.project_name}/{self.section.experiment_name}"
        self.display.start(self.total_steps, first_step=self.global_steps, title=title)
        self.display.message(self._describe())
        if self.global_steps >= self.total_steps:
            self.display.message(
                f"nothing to train: the checkpoint is at step {self.global_steps} of {self.total_steps}; raise "
                "trainer.total_training_steps to go on, or set trainer.resume_mode=disable to start anew"
            )

    def _timed_validation(self) -> dict[str, float]:
        with self.timer.stage("testing"):
            return self._validate()

    def _save_checkpoint(self) -> None:
        with self.timer.stage("save_checkpoint"):
            with folders.publishing(self.section.run_dir, self.global_steps) as folder:
                # Workers may run in another folder than the driver.
                self._save(Path(os.path.abspath(folder)))
                folders.write_state(folder, {"global_steps": self.global_steps} | self._state())
            folders.prune(self.section.run_dir, self.section.max_ckpt_to_keep)

    def _resume(self) -> None:
        """Take over the checkpoint that the configuration names, or the run's newest. Raises DataError when it is none."""
        config = self.section
        folder = folders.newest(config.run_dir) if config.resume_mode == "auto" else None
        if config.resume_mode == "resume_path":
            folder = Path(str(config.resume_from_path))
        if folder is None:
            return
        state = folders.read_state(folder)
        self.global_steps = state["global_steps"]
        self.display.message(f"resuming from {folder} at step {self.global_steps}")
        self._load(Path(os.path.abspath(folder)), state)
