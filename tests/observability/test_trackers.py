import json
import math
import resource
import signal
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, DataError, MissingExtra, ResourceError, Stopped
from lockstep.observability import trackers
from lockstep.observability.dashboards import DASHBOARDS
from lockstep.observability.trackers import Tracking


def make(run_dir: Path, *names: str, **options: Any) -> Tracking:
    return Tracking(names, project_name="project", experiment_name="name", run_dir=run_dir, config={"lr": 1e-6}, **options)


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read(path)]


def write_steps(run_dir: Path, *numbers: int) -> Path:
    with make(run_dir, "file") as tracking:
        for n in numbers:
            tracking.log({"critic/score/mean": n / 10}, step=n)
    return run_dir / "metrics.jsonl"


# -- the file --------------------------------------------------------------------------------------------------------


def test_each_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    tracking = make(tmp_path / "new" / "run", "console")
    path = tmp_path / "new" / "run" / "metrics.jsonl"
    for n in (1, 2):
        tracking.log({"a/b": 0.5}, step=n)
        assert steps(path) == list(range(1, n + 1)), "written although only the console was asked for"
    record = read(path)[0]
    assert abs(record["time"] - path.stat().st_mtime) < 60
    assert record["a/b"] == 0.5
    tracking.finish()


def test_numbers_that_are_not_finite_stay_readable_as_strict_json(tmp_path: Path) -> None:
    with make(tmp_path) as tracking:
        tracking.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 3}, step=1)
    record = read(tmp_path / "metrics.jsonl")[0]
    assert [record[k] for k in "abcd"] == ["nan", "inf", "-inf", 3]


def test_resume_drops_later_steps_and_appends(tmp_path: Path) -> None:
    path = write_steps(tmp_path, 0, 1, 2, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracking = make(tmp_path, "file", resume_step=2)
    assert steps(path) == [0, 1, 2]
    tracking.log({}, step=3)
    tracking.finish()
    assert steps(path) == [0, 1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_without_a_file_starts_one(tmp_path: Path) -> None:
    with make(tmp_path, resume_step=7) as tracking:
        tracking.log({}, step=8)
    assert steps(tmp_path / "metrics.jsonl") == [8]


@pytest.mark.parametrize("keep", [1, 20, -1])
def test_resume_drops_a_line_that_a_crash_cut_short_and_says_so(tmp_path: Path, keep: int) -> None:
    path = write_steps(tmp_path, 1, 2, 3)
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:2]) + whole[2].rstrip("\n")[:keep])
    with pytest.warns(UserWarning, match=r"metrics.jsonl: dropped lines \[3\]"):
        tracking = make(tmp_path, resume_step=9)
    tracking.log({}, step=3)
    tracking.finish()
    assert steps(path) == [1, 2, 3]


def test_resume_keeps_a_last_line_that_only_misses_its_newline(tmp_path: Path) -> None:
    path = write_steps(tmp_path, 1, 2)
    path.write_text(path.read_text().rstrip("\n"))
    with make(tmp_path, resume_step=2) as tracking:
        tracking.log({}, step=3)
    assert steps(path) == [1, 2, 3]


def test_what_is_logged_again_takes_the_place_of_the_step_when_it_is_there(tmp_path: Path) -> None:
    """It was dropped at the start: a run that was killed before it had the numbers again lost the step."""
    path = write_steps(tmp_path, 1, 2, 3)
    make(tmp_path, resume_step=2, logs_again=True).finish()
    assert steps(path) == [1, 2]
    tracking = make(tmp_path, resume_step=2, logs_again=True)
    tracking.log({"critic/score/mean": 0.2, "val-core/x": 1.0}, step=2)
    tracking.log({}, step=3)
    tracking.finish()
    assert steps(path) == [1, 2, 3]
    assert read(path)[1]["val-core/x"] == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@contextmanager
def full_disk(path: Path, room: int) -> Iterator[None]:
    """Inside, no file of this process gets longer than this one is now, and so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("room", [0, 10])
@pytest.mark.parametrize("again", [False, True])
def test_lines_that_a_full_disk_does_not_take_are_written_when_it_does(tmp_path: Path, room: int, again: bool) -> None:
    path = write_steps(tmp_path, 1, 2)
    tracking = make(tmp_path, resume_step=2, logs_again=again)
    first = 2 if again else 3
    told = f"metrics.jsonl was not written at step {first}; its lines .*File too large"
    with full_disk(path, room), pytest.warns(UserWarning, match=told):
        tracking.log({"a": 0.5, **{f"a/long/name/{i}": 0.1 for i in range(1000)}}, step=first)
    assert isinstance(tracking.unwritten, OSError)
    assert [step for line in path.read_text().splitlines() if (step := trackers._step_of(line))] == [1, 2]
    tracking.log({"a": 1.5}, step=4)
    assert tracking.unwritten is None
    tracking.finish()
    assert steps(path) == ([1, 2, 4] if again else [1, 2, 3, 4])
    assert [record["a"] for record in read(path)[-2:]] == [0.5, 1.5]


def test_lines_that_were_not_taken_are_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracking = make(tmp_path)
    with full_disk(path, 0), pytest.warns(UserWarning, match="not written at step 1"):
        tracking.log({"a": 0.5}, step=1)
    assert steps(path) == []
    tracking.finish()
    assert steps(path) == [1]


def test_a_failing_rewrite_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_steps(tmp_path, 1, 2, 3)

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(trackers.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        make(tmp_path, resume_step=1)
    assert steps(path) == [1, 2, 3]


def test_a_new_run_in_the_same_folder_never_overwrites(tmp_path: Path) -> None:
    for n in (1, 2, 3):
        write_steps(tmp_path, n)
    kept = {p.name: steps(p) for p in tmp_path.iterdir()}
    assert kept == {"metrics.1.jsonl": [1], "metrics.2.jsonl": [2], "metrics.jsonl": [3]}


# -- starting and failing --------------------------------------------------------------------------------------------


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'wandbb'.*console, file, tensorboard, wandb, mlflow, swanlab, trackio, or file.py:name"
    ):
        make(tmp_path, "console", "wandbb")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_missing_package_ends_the_start_and_touches_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_steps(tmp_path, 1)
    monkeypatch.setitem(sys.modules, name, None)
    extra = {"tensorboard": "logging", "wandb": "logging"}.get(name, name)
    with pytest.raises(MissingExtra, match=rf"trainer.logger={name} needs .*'{name}'.*pip install 'lockstep-rl\[{extra}\]'"):
        make(tmp_path, name)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_called_wandb_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    with pytest.raises(MissingExtra, match="wandb"):
        make(tmp_path, "wandb")


def test_log_after_finish_is_an_error(tmp_path: Path) -> None:
    tracking = make(tmp_path)
    tracking.finish()
    tracking.finish()
    with pytest.raises(RuntimeError, match="after finish"):
        tracking.log({}, step=1)


# -- wandb -----------------------------------------------------------------------------------------------------------


class FakeWandb(types.ModuleType):
    """Stands in for the package and for the run that its init() returns."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None, origin="wandb.py")
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.failing_step: int | None = None
        self.id = "run1"

    def init(self, **kwargs: Any) -> "FakeWandb":
        self.calls.append(("init", kwargs))
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log", {"metrics": metrics, "step": step}))
        if step == self.failing_step:
            raise ConnectionError("server is gone")

    def Table(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", {"exit_code": exit_code}))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_run_its_metrics_and_its_end(tmp_path: Path, wandb: FakeWandb) -> None:
    with make(tmp_path, "wandb") as tracking:
        tracking.log({"a": 1.0}, step=1)
    init, log, finish = wandb.calls
    assert init[1]["project"] == "project"
    assert init[1]["name"] == "name"
    assert init[1]["config"] == {"lr": 1e-6}
    assert init[1]["id"] is None
    assert log == ("log", {"metrics": {"a": 1.0}, "step": 1})
    assert finish == ("finish", {"exit_code": 0})


def test_a_resumed_run_continues_its_wandb_run_and_a_new_one_does_not(tmp_path: Path, wandb: FakeWandb) -> None:
    make(tmp_path, "wandb").finish()
    make(tmp_path, "wandb", resume_step=3).finish()
    make(tmp_path, "wandb").finish()
    assert [kwargs["id"] for call, kwargs in wandb.calls if call == "init"] == [None, "run1", None]


def test_trackio_goes_on_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no id: a run that was resumed by one was a second run, with the id for its name."""
    fake, calls = types.ModuleType("trackio"), []
    fake.__spec__ = ModuleSpec("trackio", None, origin="trackio.py")

    def init(name: str, resume: str, **_: Any) -> Any:
        calls.append((name, resume))
        return types.SimpleNamespace(id="0a1b", name=name, finish=lambda: None)

    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", fake)
    make(tmp_path, "trackio").finish()
    make(tmp_path, "trackio", resume_step=3).finish()
    assert calls == [("name", "never"), ("name", "allow")]


def test_a_table_of_samples_goes_to_those_who_show_one(tmp_path: Path, wandb: FakeWandb) -> None:
    with make(tmp_path, "wandb") as tracking:
        tracking.samples([], step=1)
        tracking.samples([{"prompt": "2 + 2", "score": 1.0}, {"prompt": "x", "score": None, "pred": ["4"]}], step=2)
    (call,) = [kwargs for call, kwargs in wandb.calls if call == "log"]
    table = {"columns": ["prompt", "score", "pred"], "data": [["2 + 2", 1.0, ""], ["x", "", "['4']"]]}
    assert call == {"metrics": {"samples": table}, "step": 2}


OWN = """
class Mine:
    def __init__(self, project_name, experiment_name, run_dir, config, resume_step):
        self.file = run_dir / "mine.txt"
        self.file.write_text(f"{project_name}/{experiment_name} {config['lr']} {resume_step}")

    def log(self, metrics, step):
        self.file.write_text(self.file.read_text() + f" {step}:{metrics['a']}")

    def finish(self, exit_code):
        self.file.write_text(self.file.read_text() + f" end {exit_code}")


def broken(**arguments):
    raise PermissionError("no key\\nfor this server")
"""


def test_a_tracker_of_the_users_own_is_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    with make(tmp_path, f"{tmp_path}/mine.py:Mine") as tracking:
        tracking.log({"a": 2}, step=1)
        tracking.samples([{"prompt": "shown by nobody"}], step=1)
    assert (tmp_path / "mine.txt").read_text() == "project/name 1e-06 None 1:2 end 0"
    with pytest.raises(DataError, match="has no 'Other'; it defines"):
        make(tmp_path, f"{tmp_path}/mine.py:Other")
    with pytest.raises(ResourceError, match=r"mine.py:broken cannot start: no key; mend it") as caught:
        make(tmp_path, f"{tmp_path}/mine.py:broken")
    assert "\n" not in str(caught.value)


def test_a_run_that_raises_is_reported_as_failed(tmp_path: Path, wandb: FakeWandb) -> None:
    with pytest.raises(ZeroDivisionError), make(tmp_path, "wandb"):
        raise ZeroDivisionError
    assert wandb.calls[-1] == ("finish", {"exit_code": 1})


def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.failing_step = 2
    tracking = make(tmp_path, "wandb")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (1, 2, 3):
            tracking.log({}, step=n)
        tracking.finish()
    assert [str(w.message) for w in caught if w.category is UserWarning] == [
        "tracker 'wandb' failed at step 2 and is dropped, the run goes on: ConnectionError('server is gone')"
    ]
    assert [kwargs["step"] for call, kwargs in wandb.calls if call == "log"] == [1, 2]
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_a_signal_that_ends_the_run_at_once_is_no_failure_of_the_tracker_it_comes_in(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log(metrics: dict[str, float], step: int) -> None:
        raise Stopped(signal.SIGINT, "a second signal")

    tracking = make(tmp_path, "wandb")
    monkeypatch.setattr(wandb, "log", log)
    with pytest.raises(Stopped):
        tracking.log({}, step=1)
    tracking.finish()


def test_a_start_that_fails_closes_what_had_started(tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError):
        make(tmp_path, "wandb", resume_step=1)
    assert wandb.calls[-1] == ("finish", {"exit_code": 1})


# -- tensorboard -----------------------------------------------------------------------------------------------------


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, numbers in ((None, (1, 2, 3)), (1, (2, 3, 4))):
        with make(tmp_path, "tensorboard", resume_step=resume_step) as tracking:
            for n in numbers:
                tracking.log({"critic/score/mean": n / 2, "broken": math.nan}, step=n)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(n, n / 2) for n in (1, 2, 3, 4)]
    assert "config/text_summary" in events.Tags()["tensors"]
