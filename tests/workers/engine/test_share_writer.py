"""What one rank writes of a checkpoint: the same bytes now or later, while the tensors go on changing."""

import json
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
    folder.mkdir()
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


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_reported_after_all_tensors_were_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    """/dev/full is a disk without space. Another rank gathers the same tensors, so none may be left."""
    write, taken = share_writer.write_weights, []
    monkeypatch.setattr(share_writer, "write_weights", lambda file, specs, tensors: write(Path("/dev/full"), specs, tensors))
    monkeypatch.setattr(share_writer, "sync", lambda file: None)
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
    assert "no space left for " in json.loads((tmp_path / "rank_0.written").read_text())["error"]
    monkeypatch.undo()
    assert save(tmp_path / "next", in_background, writer)[0].wait() is None


def test_a_report_that_cannot_be_written_is_told_by_who_waits(tmp_path: Path) -> None:
    writer = ShareWriter(torch.device("cpu"))
    writer.begin(in_background=True)
    writer.finish(tmp_path / "missing" / "rank_0.written", OSError("the folder is gone"))
    assert writer.wait() == "OSError('the folder is gone')"
    writer.begin(in_background=True)
    writer.finish(tmp_path / "missing" / "rank_0.written")
    assert "No such file" in str(writer.wait())
