"""The skeleton, with a recipe that only counts."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lockstep.config.trainer import TrainerConfig
from lockstep.errors import DataError
from lockstep.observability.display import Display
from lockstep.trainer.run import Run


@dataclass
class CountingConfig:
    trainer: TrainerConfig
    start: int = 0


@dataclass
class Heard(Display):
    """What the user saw."""

    texts: list[str] = field(default_factory=list)

    def message(self, text):
        self.texts.append(text)


class Counting(Run):
    """Adds 2 in every step. `at_step` is called in each."""

    def __init__(self, run_dir, total_steps, has_validation=True, at_step=lambda run: None, **trainer):
        config = CountingConfig(TrainerConfig(default_local_dir=str(run_dir), total_training_steps=total_steps, **trainer))
        super().__init__(config, total_steps, Heard(), has_validation)
        self.count, self.at_step = config.start, at_step

    def _step(self):
        self.at_step(self)
        self.count += 2
        return {"count": self.count}

    def _validate(self):
        return {"val-core/count": float(self.count)}

    def _state(self):
        return {"note": "two a step"}

    def _save(self, folder):
        (folder / "count").write_text(str(self.count))

    def _load(self, folder, state):
        assert state["note"] == "two a step"
        self.count = int((folder / "count").read_text())

    def _describe(self):
        return "a step adds two"


def logged(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name in ("step", "count", "val-core/count")} for row in rows]


def saved(run_dir):
    return sorted(path.name for path in run_dir.glob("global_step_*"))


def test_a_run_trains_validates_saves_and_says_what_it_came_to(tmp_path):
    run = Counting(tmp_path, 5, test_freq=2, save_freq=2, max_ckpt_to_keep=2)
    result = run.fit()
    assert (result.steps, result.checkpoint, result.metrics_file) == (5, tmp_path / "global_step_5", tmp_path / "metrics.jsonl")
    assert (result.first_validation, result.last_validation) == ({"val-core/count": 0.0}, {"val-core/count": 10.0})
    assert logged(tmp_path) == [
        {"step": 0, "val-core/count": 0.0},
        {"step": 1, "count": 2},
        {"step": 2, "count": 4, "val-core/count": 4.0},
        {"step": 3, "count": 6},
        {"step": 4, "count": 8, "val-core/count": 8.0},
        {"step": 5, "count": 10, "val-core/count": 10.0},
    ]
    assert saved(tmp_path) == ["global_step_4", "global_step_5"]
    assert "start: 0" in (tmp_path / "config.yaml").read_text()
    assert run.display.texts == ["a step adds two"]


@pytest.mark.parametrize(
    ("frequency", "due"), [(0, []), (-1, [6]), (1, [1, 2, 3, 4, 5, 6]), (4, [4, 6])], ids=["never", "last", "always", "fourth"]
)
def test_what_is_due(tmp_path, frequency, due):
    run = Counting(tmp_path, 6)
    assert [step for step in range(1, 7) if run.is_due(frequency, step)] == due


def test_a_run_continues_from_its_newest_checkpoint_or_the_named_one_or_not_at_all(tmp_path):
    run_dir, quiet = tmp_path / "run", {"val_before_train": False, "save_freq": 1, "test_freq": 0}
    Counting(run_dir, 2, **quiet).fit()
    again = Counting(run_dir, 3, **quiet)
    again.fit()
    assert logged(run_dir) == [{"step": n, "count": 2 * n} for n in (1, 2, 3)]
    assert again.display.texts[0] == f"resuming from {run_dir / 'global_step_2'} at step 2"

    named = {"resume_mode": "resume_path", "resume_from_path": str(run_dir / "global_step_1")}
    Counting(tmp_path / "other", 2, **quiet, **named).fit()
    assert logged(tmp_path / "other") == [{"step": 2, "count": 4}]
    with pytest.raises(DataError, match="global_step_N"):
        Counting(tmp_path / "other", 2, **quiet, **named | {"resume_from_path": str(tmp_path)}).fit()

    Counting(run_dir, 1, resume_mode="disable", **quiet).fit()
    assert logged(run_dir) == [{"step": 1, "count": 2}]


def test_a_run_that_is_done_says_so(tmp_path):
    Counting(tmp_path, 2, val_before_train=False).fit()
    done = Counting(tmp_path, 2, val_before_train=False)
    assert done.fit().steps == 2
    assert "nothing to train: the checkpoint is at step 2 of 2" in done.display.texts[-1]


def test_without_validation_data_nothing_is_validated_or_timed(tmp_path):
    result = Counting(tmp_path, 1, has_validation=False, test_freq=1).fit()
    assert (result.first_validation, result.last_validation) == ({}, {})
    assert "timing_s/testing" not in (tmp_path / "metrics.jsonl").read_text()


def test_val_only_trains_nothing(tmp_path):
    assert Counting(tmp_path, 3, val_only=True, val_before_train=False).fit().steps == 0
    assert logged(tmp_path) == [{"step": 0, "val-core/count": 0.0}]


def test_a_recipe_ends_early_by_making_this_step_the_last_which_is_saved(tmp_path):
    class Enough(Counting):
        def _validate(self):
            if self.count >= 4:
                self.total_steps = self.global_steps
            return super()._validate()

    assert Enough(tmp_path, 100, test_freq=1).fit().steps == 2
    assert saved(tmp_path) == ["global_step_2"]


def test_a_step_that_fails_does_not_count(tmp_path):
    def fail(run):
        if run.global_steps == 1:
            raise ValueError("no")

    run = Counting(tmp_path, 3, at_step=fail, val_before_train=False)
    with pytest.raises(ValueError, match="no"):
        run.fit()
    assert run.global_steps == 1
    assert logged(tmp_path) == [{"step": 1, "count": 2}]


def test_fit_calls_the_step_itself(tmp_path):
    callers = []
    Counting(tmp_path, 1, at_step=lambda run: callers.append(sys._getframe(2).f_code.co_qualname)).fit()
    assert callers == ["Run.fit"]


def test_times_belong_to_the_step_and_what_follows_it(tmp_path):
    def work(run):
        with run.timer.stage("step"):
            pass

    run = Counting(tmp_path, 2, at_step=work, test_freq=2, save_freq=1)
    run.fit()
    first, second = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][1:]
    assert "timing_s/save_checkpoint" in first
    assert "timing_s/testing" not in first
    assert {"timing_s/save_checkpoint", "timing_s/testing"} <= set(second)
    assert set(run.timer.seconds) == {"step", "testing", "save_checkpoint"}


def test_models_are_saved_under_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = []

    class Remembering(Counting):
        def _save(self, folder):
            folders.append(folder)
            super()._save(folder)

    Remembering(Path("run"), 1).fit()
    assert all(folder.is_absolute() for folder in folders)
