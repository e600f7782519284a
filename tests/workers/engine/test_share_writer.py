"""What one rank writes of a checkpoint: the same bytes now or later, while the tensors go on changing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.checkpoint.manifest import entry_of
from lockstep.workers.engine import share_writer
from lockstep.workers.engine.share_writer import ShareWriter

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.randn(4, 3).t()}
SPECS = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def save(folder: Path, in_background: bool, writer: ShareWriter | None = None) -> tuple[ShareWriter, Path]:
    folder.mkdir(parents=True)
    writer = writer or ShareWriter(torch.device("cpu"))
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    writer.begin(in_background)
    writer(folder / "model.safetensors", SPECS, iter(tensors.items()))
    for tensor in tensors.values():
        tensor.zero_()  # the next update
    writer.finish(folder / "rank_0.written")
    return writer, folder / "rank_0.written"


@pytest.mark.parametrize("ram", [0, 10**9], ids=["too large to be copied", "copied"])
def test_a_background_save_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ram: int) -> None:
    monkeypatch.setattr(share_writer, "available_ram", lambda: ram)
    for name, in_background in (("now", False), ("later", True)):
        writer, report = save(tmp_path / name, in_background)
        assert writer.wait() is None
        file = tmp_path / name / "model.safetensors"
        assert json.loads(report.read_text()) == {"files": {str(file): entry_of(file)}, "error": None}
    assert (tmp_path / "now/model.safetensors").read_bytes() == (tmp_path / "later/model.safetensors").read_bytes()
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in load_file(file).items())


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full is a disk without space."""
    write, opens = share_writer.write_weights, os.open
    monkeypatch.setattr(share_writer, "write_weights", lambda file, specs, tensors: write(Path("/dev/full"), specs, tensors))
    monkeypatch.setattr(share_writer, "sync", lambda file: None)
    monkeypatch.setattr(share_writer.os, "open", lambda file, *how: opens("/dev/full" if "model" in str(file) else file, *how))


@pytest.mark.parametrize("python", [sys.executable, "/no/python"], ids=["in a process", "no process to be had"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_reported_after_all_tensors_were_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: None, in_background: bool, python: str
) -> None:
    """Another rank gathers the same tensors, so none may be left."""
    taken = []
    monkeypatch.setattr(sys, "executable", python)
    writer = ShareWriter(torch.device("cpu"))
    writer.begin(in_background)

    def large():
        for name in ("a", "b"):
            taken.append(name)
            yield name, torch.zeros(10_000)

    writer(tmp_path / "model.safetensors", dict.fromkeys(("a", "b"), (torch.float32, (10000,))), large())
    writer.finish(tmp_path / "rank_0.written")
    assert writer.wait() is not None
    assert taken == ["a", "b"]
    report = json.loads((tmp_path / "rank_0.written").read_text())
    assert f"no space left for {tmp_path / 'model.safetensors'}" in report["error"]
    assert report["files"] == {}
    monkeypatch.undo()
    assert save(tmp_path / "next", in_background, writer)[0].wait() is None


@pytest.mark.parametrize("python", ["/no/python", "/bin/false"], ids=["none to be had", "somebody ended it"])
def test_a_save_whose_process_is_lost_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    save(tmp_path / "now", in_background=False)
    monkeypatch.setattr(sys, "executable", python)
    writer, report = save(tmp_path / "later", in_background=True)
    assert writer.wait() is None
    file = tmp_path / "later" / "model.safetensors"
    assert json.loads(report.read_text()) == {"files": {str(file): entry_of(file)}, "error": None}
    assert file.read_bytes() == (tmp_path / "now" / "model.safetensors").read_bytes()


def test_a_save_that_somebody_waits_for_gives_way_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a load of 16, one that gave way was not done within 300 s."""
    program = """
import os, time
from lockstep.checkpoint import write_child

def answers(jobs):
    own, nice = os.getpriority(os.PRIO_PROCESS, os.getpid()), None
    while nice != own:
        nice = os.getpriority(os.PRIO_PROCESS, 0)  # of the thread that does this piece
        yield {"nice": nice - own}
        time.sleep(0.01)

write_child.answers = answers
write_child.main([])
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as child:
        room = 19 - os.getpriority(os.PRIO_PROCESS, 0)
        assert json.loads(child.stdout.readline()) == {"nice": min(10, room)}
        child.stdin.write(b"!")
        assert json.loads(child.stdout.read().splitlines()[-1]) == {"nice": 0}
    assert child.returncode == 0

    waiting = tmp_path / "child.py"
    waiting.write_text("import select, sys\nsys.exit(0 if select.select([0], [], [], 20)[0] else 'nobody waits')")
    monkeypatch.setattr(share_writer.write_child, "__file__", str(waiting))
    done = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done.append(run(*args, **options)) or done[-1])
    assert save(tmp_path / "later", in_background=True)[0].wait() is None
    assert [one.returncode for one in done] == [0]


def test_a_second_save_uses_the_memory_of_the_first_and_has_nothing_of_it(tmp_path: Path) -> None:
    writer, _ = save(tmp_path / "first/actor", in_background=True)
    first = dict(writer._memory)
    save(tmp_path / "second/actor", in_background=True, writer=writer)[0].wait()
    assert writer._memory == first
    other = {"a": torch.ones(3), "flag": torch.tensor(True)}  # of another layout
    writer.begin(in_background=True)
    third = tmp_path / "third/actor"
    third.mkdir(parents=True)
    writer(third / "model.safetensors", {name: (t.dtype, tuple(t.shape)) for name, t in other.items()}, other.items())
    writer.finish(third / "rank_0.written")
    assert writer.wait() is None
    assert all(torch.equal(tensor, other[name]) for name, tensor in load_file(third / "model.safetensors").items())
    assert writer._memory.keys() == first.keys()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_tensor_that_was_not_announced_is_an_error(tmp_path: Path, in_background: bool) -> None:
    writer = ShareWriter(torch.device("cpu"))
    for tensors, message in (
        ({"a": torch.zeros(2), "b": torch.zeros(2)}, "b was not expected"),
        ({"a": torch.zeros(3)}, r"a is torch.float32 of \(3,\), not torch.float32 of \(2,\)"),
        ({}, "1 tensors of .* never came"),
    ):
        writer.begin(in_background)
        with pytest.raises(ValueError, match=message):
            writer(tmp_path / "model.safetensors", {"a": (torch.float32, (2,))}, tensors.items())


def test_a_report_that_cannot_be_written_is_told_by_who_waits(tmp_path: Path) -> None:
    writer = ShareWriter(torch.device("cpu"))
    writer.begin(in_background=True)
    writer.finish(tmp_path / "missing" / "rank_0.written", OSError("the folder is gone"))
    assert writer.wait() == "OSError('the folder is gone')"
    writer.begin(in_background=True)
    writer.finish(tmp_path / "missing" / "rank_0.written")
    assert "No such file" in str(writer.wait())
