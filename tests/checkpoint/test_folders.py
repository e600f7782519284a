import json
import shutil
from pathlib import Path

import pytest

from lockstep.checkpoint import folders
from lockstep.checkpoint.folders import (
    STATE,
    TRACKER,
    make_draft,
    newest,
    newest_whole,
    prune,
    publish,
    read_state,
    repair_tracker,
    write_state,
)
from lockstep.checkpoint.manifest import MANIFEST
from lockstep.errors import DataError


def save(run_dir, step, weights="weights"):
    folder = make_draft(run_dir, step)
    (folder / "actor").mkdir()
    (folder / "actor" / "model.safetensors").write_text(weights)
    write_state(folder, {"global_steps": step})
    assert publish(folder, {}) == run_dir / f"global_step_{step}"


def names(run_dir):
    return sorted(p.name for p in run_dir.iterdir() if p.is_dir())


class Crash(BaseException):
    """Ends a block as a killed process would: nothing but the code under test may run after it."""


def test_a_published_checkpoint_is_found_read_and_named_by_the_tracker(tmp_path):
    run_dir = tmp_path / "runs" / "new"
    save(run_dir, 20)
    assert newest(run_dir) == run_dir / "global_step_20"
    assert read_state(newest(run_dir)) == {"global_steps": 20}
    assert (run_dir / TRACKER).read_text() == "20"
    assert names(run_dir) == ["global_step_20"]
    assert (run_dir / "global_step_20" / "actor" / "model.safetensors").read_text() == "weights"


def test_there_is_no_newest_in_an_empty_or_missing_folder(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None


def test_a_draft_that_is_not_published_leaves_the_old_one(tmp_path):
    save(tmp_path, 10)
    write_state(make_draft(tmp_path, 20), {"global_steps": 20})
    assert newest(tmp_path) == tmp_path / "global_step_10"
    assert not (tmp_path / "global_step_20").exists()
    assert (tmp_path / TRACKER).read_text() == "10"


def test_what_a_crash_left_behind_is_ignored_and_replaced(tmp_path):
    leftover = tmp_path / "global_step_20.incomplete"
    leftover.mkdir()
    (leftover / "half.bin").write_text("half")
    write_state(leftover, {"global_steps": 20})
    assert newest(tmp_path) is None
    save(tmp_path, 20)
    assert names(tmp_path) == ["global_step_20"]
    assert not (tmp_path / "global_step_20" / "half.bin").exists()


def test_a_crash_between_the_name_and_the_tracker_still_finds_the_newest(tmp_path):
    save(tmp_path, 10)
    tracker = (tmp_path / TRACKER).read_text()
    save(tmp_path, 20)
    (tmp_path / TRACKER).write_text(tracker)  # as if the process had ended before the tracker was renamed
    assert newest(tmp_path) == tmp_path / "global_step_20"


def test_the_tracker_is_repaired_to_name_the_newest(tmp_path):
    repair_tracker(tmp_path)
    assert not (tmp_path / TRACKER).exists()
    save(tmp_path, 10)
    save(tmp_path, 20)
    for left in ("10", "", "20"):
        (tmp_path / TRACKER).write_text(left)
        repair_tracker(tmp_path)
        assert (tmp_path / TRACKER).read_text() == "20"
    (tmp_path / TRACKER).unlink()
    repair_tracker(tmp_path)
    assert (tmp_path / TRACKER).read_text() == "20"


def test_nothing_has_its_name_before_it_is_on_the_disk(tmp_path, monkeypatch):
    """After a power cut a file that was renamed but not synced may be empty."""
    events, rename = [], Path.rename
    monkeypatch.setattr(folders, "sync", lambda path: events.append(("sync", path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: events.append(("rename", path)) or rename(path, to))
    draft = make_draft(tmp_path, 10)
    (draft / "actor").mkdir()
    (draft / "actor" / "model.safetensors").write_text("weights")
    write_state(draft, {"global_steps": 10})
    publish(draft, {})
    named = events.index(("rename", draft))
    written = {draft, draft / "actor", draft / "actor" / "model.safetensors", draft / STATE, draft / MANIFEST}
    assert {path for what, path in events[:named] if what == "sync"} == written
    tracker = tmp_path / f"{TRACKER}.incomplete"
    assert events[named + 1 :] == [("sync", tracker), ("rename", tracker), ("sync", tmp_path)]


def test_publishing_a_step_again_replaces_it_whole(tmp_path):
    save(tmp_path, 20, weights="old")
    (tmp_path / "global_step_20" / "extra").write_text("old")
    save(tmp_path, 20, weights="new")
    assert (tmp_path / "global_step_20" / "actor" / "model.safetensors").read_text() == "new"
    assert not (tmp_path / "global_step_20" / "extra").exists()
    assert names(tmp_path) == ["global_step_20"]


def test_publishing_a_step_again_does_not_need_the_old_one_deleted(tmp_path, monkeypatch):
    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    save(tmp_path, 20, weights="old")
    monkeypatch.setattr(shutil, "rmtree", busy)
    save(tmp_path, 20, weights="new")
    assert (tmp_path / "global_step_20" / "actor" / "model.safetensors").read_text() == "new"
    assert names(tmp_path) == ["global_step_20", "global_step_20.removed"]


@pytest.mark.parametrize("remove", [lambda run_dir: save(run_dir, 10), lambda run_dir: prune(run_dir, 1)])
def test_a_crash_while_deleting_leaves_no_half_checkpoint_under_a_checkpoint_name(tmp_path, monkeypatch, remove):
    save(tmp_path, 10)
    save(tmp_path, 20)
    whole = shutil.rmtree

    def crash(path, **kwargs):
        if path.exists():
            (path / "actor" / "model.safetensors").unlink()
            raise Crash
        whole(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", crash)
    with pytest.raises(Crash):
        remove(tmp_path)
    monkeypatch.undo()
    assert all((folder / "actor" / "model.safetensors").exists() for folder in tmp_path.glob("global_step_*[0-9]"))
    assert newest(tmp_path) == tmp_path / "global_step_20"
    save(tmp_path, 10)  # and what was left does not stand in the way
    prune(tmp_path, 1)
    assert newest(tmp_path) == tmp_path / "global_step_20"


def test_the_newest_is_the_highest_number_not_the_last_name(tmp_path):
    for step in (10, 9, 100, 20):
        save(tmp_path, step)
    assert newest(tmp_path) == tmp_path / "global_step_100"


@pytest.mark.parametrize(("keep", "left"), [(None, [9, 10, 20]), (1, [20]), (2, [10, 20]), (5, [9, 10, 20])])
def test_pruning_keeps_the_newest(tmp_path, keep, left):
    for step in (20, 9, 10):
        save(tmp_path, step)
    (tmp_path / "global_step_best").mkdir()
    prune(tmp_path, keep)
    assert names(tmp_path) == sorted(["global_step_best", *(f"global_step_{step}" for step in left)])


def test_pruning_leaves_the_best(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    prune(tmp_path, 1, spared=[tmp_path / "global_step_2"])
    assert names(tmp_path) == ["global_step_2", "global_step_4"]


def test_the_newest_whole_one_is_found_and_damaged_ones_are_put_aside(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "global_step_3" / "actor" / "model.safetensors").unlink()
    said = []
    assert newest_whole(tmp_path, said.append) == tmp_path / "global_step_2"
    (text,) = said
    assert "global_step_3/actor/model.safetensors is missing" in text
    assert "global_step_3.damaged" in text
    assert names(tmp_path) == ["global_step_1", "global_step_2", "global_step_3.damaged"]
    prune(tmp_path, 1)
    assert names(tmp_path) == ["global_step_2", "global_step_3.damaged"]


def test_where_no_checkpoint_is_whole_nothing_begins_anew(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "global_step_1" / STATE).write_text("{}")
    for _ in range(2):  # the second start finds what the first found
        with pytest.raises(DataError, match=r"no checkpoint that is whole: .*global_step_1/trainer_state.json has 2 bytes"):
            newest_whole(tmp_path, print)
    assert newest_whole(tmp_path / "missing", print) is None


@pytest.mark.parametrize("content", [None, "", "{", "{}", "[]", '{"global_steps": "3"}'])
def test_a_folder_without_a_readable_state_is_not_a_checkpoint(tmp_path, content):
    if content is not None:
        (tmp_path / STATE).write_text(content)
    with pytest.raises(DataError, match=f"{tmp_path} is not a checkpoint: {STATE} cannot be read.*expected a global_step_N folder"):
        read_state(tmp_path)


def test_state_is_json_that_a_person_can_read(tmp_path):
    state = {"global_steps": 3, "kl_control": {"value": 0.1}, "sampler_drift": None}
    write_state(tmp_path, state)
    assert json.loads((tmp_path / STATE).read_text()) == state == read_state(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"global_steps": True}, {"global_steps": -1}, {"global_steps": 10**30}, {"left_out": ["a"]}, {"left_out": [1.5]},
        {"left_out": [-5]}, {"config": []}, {"num_prompt_batches": "x"}, {"num_prompt_batches": None}, {"num_prompt_batches": float("inf")},
        {"num_train_rows": "x"}, {"kl_control": []}, {"kl_control": {"value": float("nan")}}, {"sampler_drift": "x"},
        {"validation_before": [1]}, {"validation_before_rows": {"a": [1]}}, {"metrics": {"a": "x"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_state_with_a_value_that_no_run_writes_is_refused_with_its_name(tmp_path, wrong):
    write_state(tmp_path, {"global_steps": 2} | wrong)
    (name,) = wrong
    with pytest.raises(DataError, match=f"trainer_state.json cannot be read \\({name} is "):
        read_state(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", "[" * 100_000 + "]" * 100_000, "\0"], ids=["list", "null", "deep", "nul"])
def test_a_state_that_is_no_state_is_refused(tmp_path, text):
    (tmp_path / STATE).write_text(text)
    with pytest.raises(DataError, match="trainer_state.json cannot be read"):
        read_state(tmp_path)
