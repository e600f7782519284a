"""Drafts become checkpoints when all who write have said so; what fails is said or raised, and older ones stay."""

import errno
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from lockstep.checkpoint import folders
from lockstep.checkpoint.manifest import check_manifest, entry_of
from lockstep.checkpoint.saver import Saver, write_report
from lockstep.errors import ResourceError, Stopped


def make_saver(run_dir, *, said=None, **options):
    defaults = {"keep": None, "metric": None, "lowest": False, "stops": True}
    return Saver(run_dir, say=[].append if said is None else said.append, **defaults | options)


def begin(saver, step, metrics=None):
    draft = saver.begin(step).absolute()
    (draft / "weights").write_text(f"weights {step}")
    folders.write_state(draft, {"global_steps": step, "metrics": metrics or {}})
    return draft


def steps(run_dir):
    return [int(folder.name.rpartition("_")[2]) for folder in folders.found(run_dir)]


def test_a_checkpoint_gets_its_name_when_the_last_one_who_writes_is_done(tmp_path):
    saver = make_saver(tmp_path)
    draft = begin(saver, 1)
    reports = [draft / "rank_0.written", draft / "rank_1.written"]
    saver.publish(draft, reports, durable=[])
    write_report(reports[1], {str(draft / "weights"): entry_of(draft / "weights")}, None)
    assert steps(tmp_path) == []
    write_report(reports[0], {}, None)
    saver.wait()
    assert steps(tmp_path) == [1]
    check_manifest(tmp_path / "global_step_1")
    assert sorted(p.name for p in (tmp_path / "global_step_1").iterdir()) == ["manifest.json", "trainer_state.json", "weights"]


def test_a_folder_may_be_named_by_way_of_another(tmp_path):
    (tmp_path / "other").mkdir()
    saver = make_saver(tmp_path / "other" / ".." / "run")
    draft = Path(os.path.abspath(begin(saver, 1)))  # what workers are told
    report = draft / "rank_0.written"
    write_report(report, {str(draft / "weights"): entry_of(draft / "weights")}, None)
    saver.publish(tmp_path / "other" / ".." / "run" / draft.name, [report], durable=[])
    saver.wait()
    check_manifest(tmp_path / "run" / "global_step_1")


@pytest.mark.parametrize("removed", ["draft", "run"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_draft_that_is_removed_before_the_reports_are_read_is_a_failed_save(tmp_path, removed, waits):
    """Nobody else knows of it: all who write had said that they are done."""
    saver = make_saver(tmp_path / "run")
    draft = begin(saver, 1)
    write_report(draft / "rank_0.written", {}, None)
    shutil.rmtree(draft if removed == "draft" else draft.parent)
    ended = []

    def save():
        with pytest.raises(ResourceError, match=rf"step 1 was not saved: the folder {draft} was removed"):
            saver.publish(draft, [draft / "rank_0.written"], durable=[], waits=waits)
            saver.wait()
        ended.append(True)

    thread = threading.Thread(target=save, daemon=True)
    thread.start()
    thread.join(20)
    saver.close()
    assert ended


def test_files_that_must_not_be_lost_are_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    saver, synced = make_saver(tmp_path), []
    monkeypatch.setattr(folders, "sync", lambda path: synced.append((path, steps(tmp_path))))
    metrics = tmp_path / "metrics.jsonl"
    saver.publish(begin(saver, 1), [], durable=[metrics])
    assert (metrics, []) in synced
    assert steps(tmp_path) == [1]


def test_the_next_save_waits_for_the_one_before(tmp_path):
    saver = make_saver(tmp_path)
    draft = begin(saver, 1)
    saver.publish(draft, [draft / "late"], durable=[])
    threading.Timer(0.2, write_report, (draft / "late", {}, None)).start()
    saver.publish(begin(saver, 2), [], durable=[])
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("stops", [True, False])
def test_a_failed_save_stops_the_run_or_is_said_and_leaves_the_old_ones(tmp_path, stops):
    said = []
    saver = make_saver(tmp_path, stops=stops, said=said)
    saver.publish(begin(saver, 1), [], durable=[])
    draft = begin(saver, 2)
    saver.publish(draft, [draft / "a"], durable=[])
    write_report(draft / "a", {}, "no space left for model.safetensors")
    words = "checkpoint of step 2 was not saved: no space left for model.safetensors. Older ones are as they were"
    if stops:
        with pytest.raises(ResourceError, match=words):
            saver.wait()
    else:
        saver.wait()
        assert words in said[0]
    assert saver.failed == 2
    assert [p.name for p in tmp_path.glob("global_step_*")] == ["global_step_1"]
    check_manifest(tmp_path / "global_step_1")
    saver.publish(begin(saver, 3), [], durable=[])
    assert steps(tmp_path) == [1, 3]


def test_what_the_driver_cannot_write_is_a_failed_save_too(tmp_path):
    said = []
    saver = make_saver(tmp_path, stops=False, said=said)
    begin(saver, 1)
    saver.fail(OSError(errno.ENOSPC, "No space left on device", "trainer_state.json"))
    assert "no space left for trainer_state.json (No space left on device)" in said[0]
    assert steps(tmp_path) == []


def test_a_save_is_given_up_with_the_run_or_with_one_who_cannot_report(tmp_path):
    saver = make_saver(tmp_path)
    draft = begin(saver, 1)
    saver.publish(draft, [draft / "never"], durable=[])
    saver.cancel("no space left at all")
    with pytest.raises(ResourceError, match="no space left at all"):
        saver.wait()


def test_what_the_end_of_a_run_gave_up_is_not_held_against_the_next(tmp_path):
    saver = make_saver(tmp_path)
    draft = begin(saver, 1)
    saver.publish(draft, [draft / "never"], durable=[])
    saver.close()
    saver.publish(begin(saver, 2), [], durable=[])
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("stops", [True, False])
def test_an_old_checkpoint_that_cannot_be_deleted_is_said_and_the_new_one_is_saved(tmp_path, monkeypatch, stops):
    """An open file on NFS: the new one was there, and said to be not saved."""
    rmtree, said = folders.shutil.rmtree, []

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        if Path(path).suffix != ".removed":
            rmtree(path, ignore_errors)

    saver = make_saver(tmp_path, keep=1, stops=stops, said=said)
    saver.publish(begin(saver, 1), [], durable=[])
    monkeypatch.setattr(folders.shutil, "rmtree", busy)
    draft = begin(saver, 2)
    saver.publish(draft, [draft / "late"], durable=[])
    write_report(draft / "late", {}, None)
    saver.wait()
    assert (saver.failed, steps(tmp_path)) == (None, [2])
    assert [text.partition(": OSError")[0] for text in said] == [
        "warning: an older checkpoint was not deleted, the next save tries again"
    ]
    monkeypatch.undo()
    saver.publish(begin(saver, 3), [], durable=[])
    assert [folder.name for folder in tmp_path.glob("global_step_*")] == ["global_step_3"]
    assert len(said) == 1


def test_an_old_checkpoint_with_a_broken_state_is_said_and_stays(tmp_path):
    said = []
    saver = make_saver(tmp_path, keep=1, metric="val/score", said=said)
    saver.publish(begin(saver, 1, {"val/score": 0.9}), [], durable=[])
    (tmp_path / "global_step_1" / folders.STATE).write_text("{")
    for step, value in ((2, 0.5), (3, 0.1)):
        saver.publish(begin(saver, step, {"val/score": value}), [], durable=[])
    assert steps(tmp_path) == [1, 2, 3]
    assert saver.best() == tmp_path / "global_step_2"
    assert "global_step_1 is not a checkpoint" in said[0]


def test_a_second_signal_in_a_save_is_no_failure_of_the_save(tmp_path, monkeypatch):
    def stop(path):
        raise Stopped(signal.SIGINT, "a second signal")

    said = []
    saver = make_saver(tmp_path, said=said, stops=False)
    draft = begin(saver, 1)
    monkeypatch.setattr(folders, "sync", stop)
    with pytest.raises(Stopped, match="a second signal"):
        saver.publish(draft, [], durable=[])
    saver.wait()
    assert said == []


@pytest.mark.parametrize(("lowest", "kept", "best"), [(False, [2, 5], 2), (True, [3, 5], 3)])
def test_the_last_and_the_best_are_kept(tmp_path, lowest, kept, best):
    saver = make_saver(tmp_path, keep=1, metric="val/score", lowest=lowest)
    for step, value in enumerate((0.5, 0.9, 0.1, None, 0.3), start=1):
        saver.publish(begin(saver, step, {} if value is None else {"val/score": value}), [], durable=[])
    assert steps(tmp_path) == kept
    assert saver.best() == tmp_path / f"global_step_{best}"
    assert make_saver(tmp_path).best() is None
