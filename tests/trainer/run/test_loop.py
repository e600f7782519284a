"""The skeleton, with a recipe that only counts."""

import errno
import gc
import json
import os
import re
import signal
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lockstep.checkpoint import folders
from lockstep.config.trainer import TrainerConfig
from lockstep.data.schedule import batch_at
from lockstep.errors import (
    Alarmed,
    ConfigError,
    DataError,
    NumericalError,
    OutOfMemory,
    ResourceError,
    Stopped,
    WorkerDied,
    WorkerError,
)
from lockstep.observability.display import Display
from lockstep.observability.trackers import Tracking, _JsonLines
from lockstep.trainer.run.loop import Run, check_best
from lockstep.trainer.run.program import summarise, summarise_stage
from lockstep.trainer.run.stop import end_on_sigterm


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
    assert (result.validation_before, result.last_validation) == ({"val-core/count": 0.0}, {"val-core/count": 10.0})
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


def test_collections_in_a_step_leave_out_what_was_there_before_whatever_becomes_of_the_step(tmp_path, nothing_frozen):
    before, seen = [tmp_path], []

    def look(run):
        seen.append((gc.get_freeze_count() > 0, any(one is before for one in gc.get_objects())))
        if run.global_steps == 2:
            raise NumericalError("the loss is nan")

    Counting(tmp_path / "a", 2, at_step=look).fit()
    assert gc.get_freeze_count() == 0
    with pytest.raises(NumericalError):
        Counting(tmp_path / "b", 3, at_step=look).fit()
    assert gc.get_freeze_count() == 0
    assert seen == [(True, False)] * 5
    assert any(one is before for one in gc.get_objects())


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

    Counting(tmp_path / "third", 1, resume_mode="disable", **quiet).fit()
    assert logged(tmp_path / "third") == [{"step": 1, "count": 2}]


def test_a_new_run_in_a_used_folder_is_refused_and_deletes_nothing(tmp_path):
    quiet = {"val_before_train": False, "save_freq": 2, "max_ckpt_to_keep": 2, "test_freq": 0}
    Counting(tmp_path, 8, **quiet).fit()
    new = Counting(tmp_path, 4, resume_mode="disable", **quiet | {"max_ckpt_to_keep": 1})
    with pytest.raises(ConfigError, match=r"another run \(global_step_6, global_step_8\).*resume_mode=auto.*experiment_name"):
        new.fit()
    back = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_6")}
    with pytest.raises(ConfigError, match=r"another run \(global_step_8\)"):
        Counting(tmp_path, 8, **quiet, **back).fit()
    assert saved(tmp_path) == ["global_step_6", "global_step_8"]
    assert len(logged(tmp_path)) == 8
    (tmp_path / "global_step_8").rename(tmp_path / "kept_elsewhere")
    assert Counting(tmp_path, 8, **quiet, **back).fit().checkpoint == tmp_path / "global_step_8"


def test_two_runs_on_one_folder_are_one_too_many(tmp_path):
    def start_another(run):
        with pytest.raises(ResourceError, match=str(os.getpid())):
            Counting(tmp_path, 3).fit()

    Counting(tmp_path, 2, at_step=start_another).fit()
    opened = Counting(tmp_path, 3)
    opened.open_folder()
    with pytest.raises(ResourceError, match="in use"):
        Counting(tmp_path, 3).open_folder()
    opened.close_folder()
    assert Counting(tmp_path, 3).fit().steps == 3


def test_a_changed_configuration_is_listed_before_anything_is_loaded(tmp_path):
    Counting(tmp_path, 1).fit()
    other = Counting(tmp_path, 2, seed=5)
    other._load = None
    with pytest.raises(ConfigError, match=r"trainer.seed: 0 then, 5 now\n.*trainer.allow_changes=\[trainer.seed\]"):
        other.open_folder()
    assert Counting(tmp_path, 2, seed=5, allow_changes=["trainer.seed"]).fit().steps == 2


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    Counting(tmp_path, 1).fit()

    class OtherConfig(CountingConfig):
        pass

    other = Counting(tmp_path, 2)
    other.config = OtherConfig(other.config.trainer)
    with pytest.raises(DataError, match="another kind of training: CountingConfig, not OtherConfig"):
        other.fit()


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: file.write_text("7"), lambda file: file.write_text("")]
)
def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_says_so(tmp_path, damage):
    quiet = {"val_before_train": False, "save_freq": 1, "test_freq": 0}
    Counting(tmp_path, 3, **quiet).fit()
    damage(tmp_path / "global_step_3" / "count")
    again = Counting(tmp_path, 4, **quiet | {"max_ckpt_to_keep": 1})
    again.fit()
    assert "global_step_3/count" in again.display.texts[0]
    assert again.display.texts[1] == f"resuming from {tmp_path / 'global_step_2'} at step 2"
    assert logged(tmp_path) == [{"step": n, "count": 2 * n} for n in (1, 2, 3, 4)]
    assert saved(tmp_path) == ["global_step_3.damaged", "global_step_4"]
    named = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_3.damaged")}
    with pytest.raises(DataError, match=r"global_step_3\.damaged/count"):
        Counting(tmp_path / "other", 4, **quiet, **named).fit()


def test_what_a_killed_run_did_not_come_to_delete_is_deleted_by_the_next_start(tmp_path):
    Counting(tmp_path, 3, save_freq=1).fit()
    for leftover in ("global_step_2.removed", "global_step_4.incomplete"):
        (tmp_path / leftover / "actor").mkdir(parents=True)
    assert Counting(tmp_path, 3, save_freq=1, max_ckpt_to_keep=2).fit().steps == 3
    assert saved(tmp_path) == ["global_step_2", "global_step_3"]


class Killed(BaseException):
    """As kill -9: nothing of the run does anything after it."""


@pytest.mark.parametrize("moment", ["_begin_save", "_saver.publish", "log", "_step"])
@pytest.mark.parametrize("save_freq", [1, 2, 3])
def test_metrics_are_complete_once_and_in_order_whenever_the_run_is_killed(tmp_path, monkeypatch, moment, save_freq):
    """Killed before and after each of the four, in every step, it ends with the lines and the checkpoint of a run that was not."""
    for step in range(1, 7):
        for after in (False, True):
            run = Counting(tmp_path, 7, save_freq=save_freq, test_freq=2)
            kill_at(run, moment, step, after, monkeypatch)
            with suppress(Killed):  # it may be done already
                run.fit()
            monkeypatch.undo()
    Counting(tmp_path, 7, save_freq=save_freq, test_freq=2).fit()
    counts = [{"step": step, "count": 2 * step} for step in range(1, 8)]
    expected = [{"step": 0}, *counts]
    assert [{k: v for k, v in line.items() if k != "val-core/count"} for line in logged(tmp_path)] == expected
    assert [line["step"] for line in logged(tmp_path) if "val-core/count" in line] == [0, 2, 4, 6, 7]
    assert (folders.newest(tmp_path) / "count").read_text() == "14"


def kill_at(run, moment, step, after, monkeypatch):
    """Raise Killed before or after a call of `moment` in a step that is due (the next one that calls it)."""
    owner, _, name = moment.rpartition(".")
    target = getattr(run, owner) if owner else Tracking if name == "log" else run
    original = getattr(target, name)

    def killing(*args, **kwargs):
        due = run.global_steps + (name == "_step") >= step
        if due and not after:
            raise Killed
        result = original(*args, **kwargs)
        if due:
            raise Killed
        return result

    monkeypatch.setattr(target, name, killing)


def test_the_metrics_of_a_step_are_on_the_disk_before_its_checkpoint_has_its_name(tmp_path, monkeypatch):
    synced = []

    def sync(path):
        if path.name == "metrics.jsonl":
            synced.append(([row["step"] for row in logged(tmp_path)][-1], saved(tmp_path)))

    monkeypatch.setattr(folders, "sync", sync)
    Counting(tmp_path, 2, save_freq=1, val_before_train=False, test_freq=0).fit()
    assert synced == [
        (1, ["global_step_1.incomplete"]),
        (2, ["global_step_1", "global_step_2.incomplete"]),
    ]


def test_a_failed_reward_is_recorded_once_wherever_the_run_is_killed(tmp_path):
    """A step that is done again records its failures again; so does a start that is thrown away."""

    class Failing(Counting):
        killed_at = None

        def _validate(self):
            return self._failed(f"validation {self.global_steps}") or super()._validate()

        def _step(self):
            self._failed(f"step {self.global_steps + 1}")
            return super()._step()

        def _failed(self, what):
            with (self.section.run_dir / "reward_failures.jsonl").open("a") as file:
                file.write(json.dumps({"what": what}) + "\n" + '{"cut')
                file.flush()
                if what == self.killed_at:
                    raise Killed
                file.truncate(file.tell() - len('{"cut'))

    def failures(folder, name="reward_failures.jsonl"):
        return (folder / name).read_text()

    keys = {"save_freq": 2, "test_freq": 3}
    Failing(tmp_path / "whole", 5, **keys).fit()
    for moment in ("step 1", "step 3", "validation 3", "step 4", "validation 5"):
        killed = Failing(tmp_path / moment, 5, **keys)
        killed.killed_at = moment
        with pytest.raises(Killed):
            killed.fit()
        Failing(tmp_path / moment, 5, **keys).fit()
        assert failures(tmp_path / moment) == failures(tmp_path / "whole"), moment
    assert failures(tmp_path / "step 1", "reward_failures.1.jsonl").endswith('{"what": "step 1"}\n{"cut')


def test_a_tracker_that_a_kill_left_behind_is_repaired_by_the_next_start_also_of_a_run_that_is_done(tmp_path):
    Counting(tmp_path, 2, save_freq=1).fit()
    (tmp_path / folders.TRACKER).write_text("1")  # as if the run was killed before the tracker was renamed
    Counting(tmp_path, 2, save_freq=1).fit()
    assert (tmp_path / folders.TRACKER).read_text() == "2"


def test_the_validation_before_training_is_that_of_the_first_start(tmp_path):
    Counting(tmp_path, 1).fit()
    result = Counting(tmp_path, 2).fit()
    assert (result.validation_before, result.last_validation) == ({"val-core/count": 0.0}, {"val-core/count": 4.0})
    assert [line["step"] for line in logged(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("test_freq", [-1, 1])
def test_the_summary_shows_no_before_that_was_not_measured(tmp_path, test_freq):
    """Without trainer.val_before_train it showed the first validation of training, or the last, as the one before."""
    trained = {"val_before_train": False, "test_freq": test_freq}
    result = Counting(tmp_path, 2, **trained).fit()
    assert (result.validation_before, result.last_validation) == ({}, {"val-core/count": 4.0})
    assert "  val-core/count: 4.000 after\n" in summarise(result, embedded=False)
    assert "  val-core/count: 4.0000 after\n" in summarise_stage(result, ("val-core/",))
    resumed = Counting(tmp_path, 3, **trained).fit()
    assert "  val-core/count: 6.000 after\n" in summarise(resumed, embedded=False)
    measured = Counting(tmp_path / "other", 2, test_freq=test_freq).fit()
    assert "  val-core/count: 0.000 before, 4.000 after\n" in summarise(measured, embedded=False)


def test_the_summary_shows_a_validation_alone_without_before_and_after_and_with_its_interval(tmp_path):
    class Sure(Counting):
        def _validate(self):
            return {"val-core/a": 0.5, "val-aux/a/low": 0.25, "val-aux/a/high": 0.75}

    assert "\n  val-core/a: 0.500 [0.250, 0.750]\n" in summarise(Sure(tmp_path, 3, val_only=True).fit(), embedded=False)


def test_the_best_checkpoint_is_kept_and_named(tmp_path):
    class Rising(Counting):
        def _validate(self):
            return {"val-core/acc": {2: 0.9, 4: 0.2, 5: 0.4}.get(self.global_steps, 0.0)}

    best = {"best_metric": "val-core/acc", "max_ckpt_to_keep": 1}
    result = Rising(tmp_path, 5, save_freq=1, test_freq=2, **best).fit()
    assert saved(tmp_path) == ["global_step_2", "global_step_5"]
    assert result.best_checkpoint == tmp_path / "global_step_2"


def test_a_best_metric_that_is_not_there_is_said_before_work_is_lost(tmp_path):
    """After the first step where it can be known then, or else with the work kept."""
    told = r"best_metric=\S+ is not among the metrics: count"
    for number, (best, options) in enumerate({"val-core/acc": {}, "cuont": {}, "count_": {"has_validation": False}}.items()):
        folder = tmp_path / f"early{number}"
        with pytest.raises(ConfigError, match=told):
            Counting(folder, 3, best_metric=best, **options).fit()
        assert not saved(folder)
    late = Counting(tmp_path / "late", 3, best_metric="val-core/acc", val_before_train=False)
    assert late.fit().best_checkpoint is None
    assert saved(tmp_path / "late") == ["global_step_3"]
    assert any("warning: trainer.best_metric=val-core/acc is not among the metrics: count" in text for text in late.display.texts)
    part = Counting(
        tmp_path / "part", 2, at_step=lambda run: run.validation_before.update({"val-aux/share_of_rows": 0.1}), test_freq=0
    )
    part.section.best_metric = "val-core/of_other_rows"
    part.fit()
    idle = Counting(tmp_path / "idle", 3, best_metric="actor/loss", critic_warmup=2)
    idle.fit()
    warned = [text for text in idle.display.texts if "warning" in text]
    assert warned
    assert all("trainer.best_metric=actor/loss" in text for text in warned)


@pytest.mark.parametrize("policy", ["stop", "continue"])
@pytest.mark.parametrize(
    "error",
    [
        lambda file: OSError(errno.ENOSPC, "No space left on device", str(file)),
        lambda file: Exception(f"No space left on device (os error 28): {file}"),
    ],
    ids=["Python's", "Rust's"],
)
def test_a_full_disk_stops_the_run_or_not_and_leaves_older_checkpoints(tmp_path, policy, error):
    class Full(Counting):
        def _save(self, folder):
            if self.global_steps == 2:
                raise error(folder / "count")
            super()._save(folder)

    run = Full(tmp_path, 3, save_freq=1, on_save_failure=policy)
    if policy == "stop":
        with pytest.raises(ResourceError, match=r"step 2 was not saved: no space left .*count"):
            run.fit()
        assert saved(tmp_path) == ["global_step_1"]
    else:
        run.fit()
        assert saved(tmp_path) == ["global_step_1", "global_step_3"]
        assert any("no space left" in text for text in run.display.texts)
    with pytest.raises(ResourceError, match="step 2"):
        Full(tmp_path / "last", 2, save_freq=1, on_save_failure=policy).fit()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, number, capfd):
    def interrupt(run):
        if run.global_steps == 1:
            os.kill(os.getpid(), number)
            assert wait_for(lambda: [text for text in run.display.texts if "again" in text])

    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    run = Counting(tmp_path, 5, at_step=interrupt)
    with pytest.raises(
        Stopped, match=rf"{number.name}: ended after step 2 of 5; the newest checkpoint is .*global_step_2"
    ) as stopped:
        run.fit()
    assert stopped.value.signum == number
    assert f"lockstep report {tmp_path}" in str(stopped.value)
    (told,) = [text for text in run.display.texts if "again" in text]
    assert told.startswith(f"{'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}: finishing step 2 of 5 and saving it")
    assert capfd.readouterr().err == "", "nothing is written over the display"
    assert handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    Counting(tmp_path, 5).fit()
    assert [line["step"] for line in logged(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_a_signal_is_acknowledged_while_the_main_thread_is_busy_and_not_for_one_of_a_child(tmp_path):
    """Python runs handlers between its own instructions only, and one call of a kernel may take minutes."""
    heard = []

    def busy(run):
        if run.global_steps == 1:
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            os.waitpid(child, 0)
            time.sleep(0.2)
            heard.append([text for text in run.display.texts if "again" in text])
            with signal_blocked_in(run):
                os.kill(os.getpid(), signal.SIGTERM)
                heard.append(wait_for(lambda: [text for text in run.display.texts if "again" in text]))

    @contextmanager
    def signal_blocked_in(run):
        """As if this was one long call into C: the handler is not run inside."""
        handler, late = signal.getsignal(signal.SIGTERM), []
        signal.signal(signal.SIGTERM, lambda *which: late.append(which))
        yield
        signal.signal(signal.SIGTERM, handler)
        handler(*late[0])

    with pytest.raises(Stopped):
        Counting(tmp_path, 5, at_step=busy).fit()
    assert heard[0] == []
    (told,) = heard[1]
    assert re.match(r"SIGTERM: finishing step 2 of 5 and saving it, about 1 s, at most 300 s", told)


def wait_for(condition):
    """What it returns, as soon as that is true."""
    deadline = time.monotonic() + 20
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("moment", ["log", "samples"])
def test_a_signal_after_the_step_ends_the_run_with_a_checkpoint_too(tmp_path, monkeypatch, moment):
    """While a dashboard takes the metrics: when it had been decided that this step is not saved."""
    original = getattr(Tracking, moment)

    def interrupted(tracking, sent, step):
        original(tracking, sent, step)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Tracking, moment, interrupted)
    keys = {"save_freq": 20, "test_freq": 0, "val_before_train": False}
    with pytest.raises(Stopped, match="SIGTERM: ended after step 1 of 40; the newest checkpoint is .*global_step_1;"):
        Counting(tmp_path, 40, **keys).fit()
    assert (tmp_path / "global_step_1/count").read_text() == "2"
    monkeypatch.undo()
    assert Counting(tmp_path, 3, **keys).fit().steps == 3
    assert logged(tmp_path) == [{"step": step, "count": 2 * step} for step in (1, 2, 3)]


def test_a_signal_before_the_first_step_after_a_resume_saves_nothing_again(tmp_path):
    Counting(tmp_path, 2).fit()
    before = (tmp_path / "global_step_2").stat().st_ino
    again = Counting(tmp_path, 4)
    again._describe = lambda: os.kill(os.getpid(), signal.SIGTERM) or "a signal"
    with pytest.raises(Stopped, match="ended after step 2 of 4; the newest checkpoint is .*global_step_2;"):
        again.fit()
    assert (tmp_path / "global_step_2").stat().st_ino == before


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_validation_that_a_signal_left_out_is_made_when_the_run_goes_on(tmp_path, at):
    """After the step that the signal came in, also after the last one: such a run is not done."""

    def interrupt(run):
        if run.global_steps == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Counting(tmp_path / "whole", 4, test_freq=1).fit()
    with pytest.raises(Stopped, match=f"ended after step {at} of 4; the newest checkpoint is .*global_step_{at}"):
        Counting(tmp_path / "cut", 4, at_step=interrupt, test_freq=1).fit()
    assert "val-core/count" not in logged(tmp_path / "cut")[-1]
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "co')  # what a crash leaves
    with pytest.warns(UserWarning, match="which a crash left unreadable"):
        result = Counting(tmp_path / "cut", 4, test_freq=1).fit()
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
    assert result.last_validation == {"val-core/count": 8.0}
    again = Counting(tmp_path / "cut", 4, test_freq=1)
    again.fit()
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole"), "it is not made a third time"


def test_a_validation_that_is_owed_and_fails_is_still_owed_and_its_step_still_there(tmp_path):
    """The step's line was dropped before the validation, and was nowhere but in memory."""

    def interrupt(run):
        if run.global_steps == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    class Failing(Counting):
        def _validate(self):
            raise RuntimeError("as if it was killed here")

    keys = {"test_freq": 2, "save_freq": 2, "val_before_train": False}
    Counting(tmp_path / "whole", 4, **keys).fit()
    with pytest.raises(Stopped):
        Counting(tmp_path / "cut", 4, at_step=interrupt, **keys).fit()
    with pytest.raises(RuntimeError, match="killed here"):
        Failing(tmp_path / "cut", 4, **keys).fit()
    assert logged(tmp_path / "cut") == [{"step": 1, "count": 2}, {"step": 2, "count": 4}]
    Counting(tmp_path / "cut", 4, **keys).fit()
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")


@pytest.mark.parametrize("full", [{3}, {4}, {6}], ids=["beside no save", "beside a save", "at the end"])
@pytest.mark.filterwarnings("ignore:metrics.jsonl was not written", "ignore:tracker 'file' did not finish")
def test_metrics_that_a_full_disk_did_not_take_are_written_later_and_no_checkpoint_is_before_them(tmp_path, monkeypatch, full):
    original = _JsonLines._write

    def write(file):
        last = json.loads(file._unwritten.splitlines()[-1])["step"] if file._unwritten else None
        if last in full:
            file.error = OSError(errno.ENOSPC, "No space left on device")
            raise file.error
        original(file)

    monkeypatch.setattr(_JsonLines, "_write", write)
    run = Counting(tmp_path, 6, save_freq=2, test_freq=0, val_before_train=False, on_save_failure="continue")
    if full == {6}:
        with pytest.raises(ResourceError, match="step 6, the last one, was not saved"):
            run.fit()
    else:
        run.fit()
        assert [row["step"] for row in logged(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert saved(tmp_path) == [f"global_step_{step}" for step in (2, 4, 6) if step not in full]


def test_a_second_signal_and_the_deadline_end_the_run_at_once(tmp_path):
    def twice(run):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(
        Stopped, match="SIGTERM: a second signal before this step was saved: ended after step 0 of 5; there is no checkpoint"
    ):
        Counting(tmp_path / "twice", 5, at_step=twice).fit()

    def hang(run):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    started = time.monotonic()
    with pytest.raises(
        Stopped, match=r"SIGTERM: 0.2 s \(trainer.stop_deadline_s\) were over before this step was saved: ended after step \d of"
    ):
        Counting(tmp_path / "hang", 5, at_step=hang, stop_deadline_s=0.2).fit()
    assert time.monotonic() - started < 10
    assert saved(tmp_path / "twice") == saved(tmp_path / "hang") == []


def test_a_second_signal_ends_a_run_at_once_also_while_it_saves_or_ends_with_an_error(tmp_path, monkeypatch):
    def twice(path):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(folders, "sync", twice)
    for policy in ("stop", "continue"):
        run = Counting(tmp_path / policy, 3, save_freq=1, on_save_failure=policy)
        with pytest.raises(Stopped, match="SIGINT: a second signal"):
            run.fit()
        (told,) = run.display.texts[1:]
        assert told.startswith("Ctrl-C: finishing step 1 of 3 and saving it"), "and no failed save"

    def ended():  # the program's own handler, while the last save is waited for
        raise Stopped(signal.SIGTERM, "SIGTERM: ended")

    lost = Losing(tmp_path / "lost", 3, at=[2], max_restarts=1, save_freq=0)
    lost._end_save = ended
    with pytest.raises(Stopped, match="SIGTERM: ended"):
        lost.fit()
    assert lost.num_restarts == 0


class Fruitless(Counting):
    """Every response has the same score."""

    def _step(self):
        return super()._step() | {f"critic/score/{name}": 0.0 for name in ("mean", "max", "min")}

    def _examine(self, metrics):
        return [{"prompt": "2 + 2", "response": "five\x1b[2J", "score": 0.0}]


def test_a_run_that_learns_nothing_says_so_once_and_at_its_end(tmp_path):
    run = Fruitless(tmp_path, 6)
    (alarm,) = run.fit().alarms
    assert "equal_rewards" in alarm
    shown = [text for text in run.display.texts if "alarm" in text]
    assert shown == [f"{alarm}\n  prompt: '2 + 2'\n  response: 'five\\x1b[2J'\n  score: '0.0'"]
    (row,) = map(json.loads, (tmp_path / "alarms.jsonl").read_text().splitlines())
    assert (row["step"], row["name"], row["samples"][0]["score"]) == (3, "equal_rewards", 0.0)


def test_an_alarm_stops_the_run_with_a_checkpoint_where_it_may_and_the_next_start_goes_on(tmp_path):
    with pytest.raises(
        Alarmed, match="equal_rewards, and trainer.on_alarm=stop: ended after step 3 of 6; the newest checkpoint is .*global_step_3"
    ) as caught:
        Fruitless(tmp_path, 6, on_alarm="stop", save_freq=-1).fit()
    assert caught.value.exit_status == 3
    assert saved(tmp_path) == ["global_step_3"]
    assert Fruitless(tmp_path, 6, on_alarm="stop", save_freq=-1).fit().steps == 6, "the user has read it, and goes on"


def test_an_alarm_of_a_step_that_was_lost_is_none_until_the_step_is_done_again(tmp_path):
    """The run began again, did no step, and ended with an alarm without a name."""

    class Dying(Fruitless):
        def _save(self, folder):
            super()._save(folder)
            if self.global_steps == 3 and not self.num_restarts:
                raise WorkerDied("actor rank 0", "its process ended")

        def _restart(self):
            self.count = 0
            self.open_folder()

    with pytest.raises(Alarmed, match="^equal_rewards, and trainer.on_alarm=stop: ended after step 3 of 6; .*global_step_3"):
        Dying(tmp_path, 6, on_alarm="stop", save_freq=1, max_restarts=1).fit()


def test_a_run_that_never_saves_does_not_on_a_signal(tmp_path):
    with pytest.raises(Stopped, match="there is no checkpoint"):
        Counting(tmp_path, 5, save_freq=0, at_step=lambda run: os.kill(os.getpid(), signal.SIGTERM)).fit()


def test_a_run_that_is_done_says_so(tmp_path):
    first = Counting(tmp_path, 2).fit()
    done = Counting(tmp_path, 2)
    result = done.fit()
    assert (result.steps, result.validation_before, result.last_validation) == (2, first.validation_before, {})
    assert "nothing to train: the checkpoint is at step 2 of 2" in done.display.texts[-1]


def test_without_validation_data_nothing_is_validated_or_timed(tmp_path):
    result = Counting(tmp_path, 1, has_validation=False, test_freq=1).fit()
    assert (result.validation_before, result.last_validation) == ({}, {})
    assert "timing_s/testing" not in (tmp_path / "metrics.jsonl").read_text()


def test_the_validation_before_the_first_step_is_no_longer_than_a_step_and_says_so(tmp_path):
    class Rows(Counting):
        def _validate(self):
            return {"val-core/rows": float(len(self._validated_rows("rows", 100, samples_per_row=2, samples_per_step=8)))}

    def rows(name, **trainer):
        run = Rows(tmp_path / name, 2, test_freq=1, **trainer)
        run.fit()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        validations = [metrics for line in lines if "val-core/rows" in (metrics := json.loads(line))]
        return [metrics["val-core/rows"] for metrics in validations], run.display.texts, validations

    counts, texts, (first, *later) = rows("capped")
    assert counts == [4.0, 100.0, 100.0]
    assert sum("on 4 of 100 rows (trainer.val_before_train_samples=-1: all)" in text for text in texts) == 1
    assert first["val-aux/share_of_rows"] == 0.04
    assert not any("val-aux/share_of_rows" in metrics for metrics in later)
    assert rows("all", val_before_train_samples=-1)[0] == [100.0] * 3
    assert rows("asked", val_only=True)[0] == [100.0]


class Sets(Counting):
    """Validates rows of which number i has the value i + 100 a step; `sets` is the number of rows of each set."""

    sets = {"rows": 10}

    def _validate(self):
        found = {}
        for name, num_rows in self.sets.items():
            rows, first = self._validated_rows(name, num_rows, 1, 4), self._first_rows(name, num_rows)
            found[f"val-core/{name}"] = self._mean(rows)
            found |= {} if first is None else {f"val-first/val-core/{name}": self._mean(first)}
        return found

    def _mean(self, rows):
        return sum(rows) / len(rows) + 100.0 * self.global_steps


@pytest.mark.parametrize("resumed", [False, True])
def test_the_summary_compares_the_rows_of_before_with_the_same_rows(tmp_path, resumed):
    """Training that changes every row by 200 changes "before" to "after" by 200, whichever rows were validated before."""

    def train(name, **options):
        if resumed:
            Sets(tmp_path / name, 1, save_freq=1, **options).fit()
        result = Sets(tmp_path / name, 2, save_freq=1, **options).fit()
        after = result.validation_after
        assert after.keys() >= {"val-core/rows"}
        for metric, value in after.items():
            assert value - result.validation_before[metric] == 200.0
        return result

    words = summarise(train("part"), embedded=False)
    assert "val-core/rows: 204.500 after" in words
    assert "on the rows that were validated before training: 3.500 before, 203.500 after" in words
    words = summarise(train("whole", val_before_train_samples=-1), embedded=False)
    assert "val-core/rows: 4.500 before, 204.500 after" in words
    assert "val-first" not in (tmp_path / "whole/metrics.jsonl").read_text()
    two = Sets.sets | {"few": 3}
    Sets.sets, one = two, Sets.sets
    try:
        assert train("two").validation_after.keys() == {"val-core/rows", "val-core/few"}
    finally:
        Sets.sets = one


def test_validation_data_of_another_size_are_not_compared_with_those_of_before(tmp_path):
    for samples in (None, -1):
        Sets(tmp_path / str(samples), 1, save_freq=1, val_before_train_samples=samples).fit()
        other = Sets(tmp_path / str(samples), 2, save_freq=1, val_before_train_samples=samples)
        other.sets = {"rows": 8}
        words = summarise(other.fit(), embedded=False)
        assert "before" not in words
        assert "val-core/rows: 203.500 after" in words


def test_val_only_trains_nothing(tmp_path):
    assert Counting(tmp_path, 3, val_only=True, val_before_train=False).fit().steps == 0
    assert logged(tmp_path) == [{"step": 0, "val-core/count": 0.0}]


def test_val_only_of_a_resumed_run_completes_the_line_of_its_step(tmp_path):
    Counting(tmp_path, 3, test_freq=2, save_freq=1).fit()
    for _ in range(2):
        result = Counting(tmp_path, 3, test_freq=2, val_only=True).fit()
        assert result.last_validation == {"val-core/count": 6.0}
        assert [row["step"] for row in logged(tmp_path)] == [0, 1, 2, 3]
        assert logged(tmp_path)[-1] == {"step": 3, "count": 6, "val-core/count": 6.0}


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
    assert [folder.is_absolute() for folder in folders] == [True]


class Losing(Counting):
    """Loses its workers, and what they had, at the start of the steps in `at`."""

    def __init__(self, run_dir, total_steps, at, error=None, **trainer):
        self.at, self.error = list(at), error or WorkerDied("critic rank 1", "its process ended")
        super().__init__(run_dir, total_steps, at_step=self.lose, **trainer)

    @staticmethod
    def lose(run):
        if run.at and run.global_steps + 1 == run.at[0]:
            run.at.pop(0)
            run.count = -1000
            raise run.error

    def _restart(self):
        self.count = 0
        self.open_folder()


@pytest.mark.parametrize("save_freq", [1, 2, -1])
@pytest.mark.parametrize("resume_mode", ["auto", "disable"])
def test_a_run_that_loses_its_workers_ends_as_one_that_does_not(tmp_path, save_freq, resume_mode):
    keys = {"save_freq": save_freq, "test_freq": 3, "resume_mode": resume_mode}
    Counting(tmp_path / "whole", 6, **keys).fit()
    run = Losing(tmp_path / "run", 6, at=[1, 4, 4], max_restarts=3, **keys)
    waits, run.display.waits = [], lambda: waits.append(run.num_restarts) or nullcontext()
    assert run.fit().steps == 6
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")
    assert (tmp_path / "run/global_step_6/count").read_text() == "12"
    assert run.num_restarts == 3
    assert waits == [1, 2, 3]
    said = [text for text in run.display.texts if "restart" in text]
    assert len(said) == 3
    assert "critic rank 1 died: its process ended" in said[0]
    assert "restart 1 of at most 3" in said[0]


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemory("out of memory in stage update_actor"),
        torch.OutOfMemoryError("CUDA out of memory"),
        WorkerError("actor rank 0", "OutOfMemory: out of memory in stage update_actor"),
        WorkerError("actor rank 0", "RuntimeError: x\ntorch.OutOfMemoryError: CUDA out of memory"),
    ],
    ids=["here", "of torch here", "in a worker", "of torch in a worker"],
)
def test_a_run_that_runs_out_of_memory_begins_again(tmp_path, error):
    assert Losing(tmp_path, 4, at=[3], error=error, max_restarts=1, save_freq=1).fit().steps == 4
    assert logged(tmp_path)[-1] == {"step": 4, "count": 8, "val-core/count": 8.0}
    with pytest.raises(ResourceError, match="too few"):
        Losing(tmp_path / "other", 4, at=[3], error=ResourceError("too few GPUs"), max_restarts=1, save_freq=1).fit()


def test_workers_are_started_again_so_often_and_for_what_a_restart_can_mend_only(tmp_path):
    with pytest.raises(WorkerDied):
        Losing(tmp_path / "a", 6, at=[2, 3], max_restarts=1, save_freq=1).fit()
    with pytest.raises(WorkerDied):
        Losing(tmp_path / "b", 6, at=[2]).fit()
    bug = WorkerError("critic rank 0", "Traceback ... KeyError: 'values'")
    with pytest.raises(WorkerError, match="KeyError"):
        Losing(tmp_path / "c", 6, at=[2], error=bug, max_restarts=5).fit()
    full = WorkerError("critic rank 0", "Traceback ... torch.OutOfMemoryError: CUDA out of memory")
    assert Losing(tmp_path / "d", 6, at=[2], error=full, max_restarts=1).fit().steps == 6


@pytest.mark.parametrize(
    "error", [WorkerDied("actor rank 0", "killed by SIGTERM"), NumericalError("the loss is nan")], ids=["lost", "not finite"]
)
def test_a_run_that_was_asked_to_stop_does_not_begin_again(tmp_path, error):
    """A signal to all processes of a job ends workers too: the run trained on with new ones until it was killed."""

    def interrupt(run):
        if run.global_steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            raise error

    run = Counting(tmp_path, 6, at_step=interrupt, save_freq=1, max_restarts=3, on_nonfinite="rollback")
    with pytest.raises(Stopped, match="SIGTERM: ended after step 2 of 6; the newest checkpoint is .*global_step_2;"):
        run.fit()
    assert (run.num_restarts, run.left_out) == (0, [])
    assert f"warning: {error}" in run.display.texts
    assert Counting(tmp_path, 6, save_freq=1).fit().steps == 6


def test_a_signal_while_new_workers_start_says_that_there_is_a_checkpoint(tmp_path):
    class Slow(Losing):
        def _restart(self):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        end_on_sigterm()
        with pytest.raises(Stopped, match="SIGTERM: ended while no step was being done; .* goes on from the newest checkpoint"):
            Slow(tmp_path, 6, at=[3], max_restarts=1, save_freq=1).fit()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert Counting(tmp_path, 6, save_freq=1).fit().steps == 6


def test_a_run_from_a_named_checkpoint_begins_again_from_its_own(tmp_path):
    Counting(tmp_path / "first", 2).fit()
    named = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "first/global_step_2"), "val_before_train": False}
    Losing(tmp_path / "run", 6, at=[3, 5], max_restarts=2, save_freq=2, test_freq=0, **named).fit()
    assert logged(tmp_path / "run") == [{"step": step, "count": 2 * step} for step in (3, 4, 5, 6)]


class Poisoned(Counting):
    """Adds the number of its batch; some batches are not finite."""

    def __init__(self, run_dir, total_steps, bad, error, **trainer):
        super().__init__(run_dir, total_steps, val_before_train=False, test_freq=0, **trainer)
        self.bad, self.batch_error, self.batches = bad, error, []

    def _step(self):
        number = batch_at(self.global_steps, self.left_out)
        if number in self.bad:
            self.count = -1000
            raise self.batch_error
        self.batches.append(number)
        self.count += number
        return {"count": self.count}

    def _restart(self):
        self.count = 0
        self.open_folder()


@pytest.mark.parametrize("save_freq", [1, 2, -1])
@pytest.mark.parametrize(
    "error", [NumericalError("the loss is nan"), WorkerError("actor rank 0", "NumericalError: the loss is nan\n\nTraceback ...")]
)
def test_a_batch_that_is_not_finite_is_left_out_and_the_run_goes_on_from_its_checkpoint(tmp_path, save_freq, error):
    keys = {"save_freq": save_freq, "on_nonfinite": "rollback", "max_restarts": 5}
    run = Poisoned(tmp_path, 5, {2, 3, 6}, error, **keys)
    run.fit()
    assert run.left_out == [2, 3, 6]
    assert logged(tmp_path)[-1] == {"step": 5, "count": 0 + 1 + 4 + 5 + 7}
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["training/left_out_batches"] == 3
    assert "the run goes on without batch 2 from the newest checkpoint: restart 1 of at most 5" in "\n".join(run.display.texts)
    again = Poisoned(tmp_path, 6, {2, 3, 6}, error, **keys)
    again.fit()
    assert again.batches == [8]


def test_numbers_that_are_not_finite_stop_a_run_unless_it_is_told_otherwise(tmp_path):
    with pytest.raises(NumericalError):
        Poisoned(tmp_path / "a", 5, {2}, NumericalError("nan"), max_restarts=5).fit()
    with pytest.raises(NumericalError):
        Poisoned(tmp_path / "b", 5, {2, 3}, NumericalError("nan"), on_nonfinite="rollback", max_restarts=1).fit()
    with pytest.raises(ConfigError, match="rollback needs trainer.max_restarts"):
        TrainerConfig(on_nonfinite="rollback")


def test_while_only_the_critic_learns_a_metric_of_the_actor_is_not_missed():
    told = []
    section = SimpleNamespace(best_metric="actor/entropy", critic_warmup=2)
    for step in (1, 2):
        check_best(section, {"val-core/x": 1.0}, {}, step, told.append)
    assert told == []
    check_best(section, {"val-core/x": 1.0}, {}, 3, told.append)
    assert len(told) == 1
    with pytest.raises(ConfigError, match="trainer.best_metric=actor/entropy"):
        check_best(SimpleNamespace(best_metric="actor/entropy"), {"val-core/x": 1.0}, {}, 1, told.append)
