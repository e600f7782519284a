"""benchmarks/saves.py: the order of its blocks, and what it makes of the times."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import saves

SMALL = ["--shape", "tiny", "--device", "cpu", "--rows", "1", "--updates", "3"]


class TwoUpdatesLong(saves.ShareWriter):
    """A save seems to be written while two updates are made, however fast the disk is."""

    def begin(self, in_background):
        super().begin(in_background)
        self.left = 2

    @property
    def is_done(self):
        self.left -= 1
        return self.left < 0


def test_blocks_without_a_save_are_around_every_save_and_every_update_is_written_down(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saves, "RESULTS", tmp_path)
    monkeypatch.setattr(saves, "ShareWriter", TwoUpdatesLong)
    saves.main([*SMALL, "--saves", "2"])
    blocks = [line.split("  mean")[0].strip() for line in capsys.readouterr().out.splitlines() if " updates " in line]
    without, beside = "3 updates without a save", "2 updates beside a save"
    assert blocks == [without, beside, without, beside, without]
    result = json.loads((tmp_path / "saves_tiny_cpu.json").read_text())
    update_s, background = result["update_s"], result["in_background"]
    assert [block["updates"] for block in update_s["blocks_without"]] == [3, 3, 3]
    assert [block["updates"] for block in update_s["blocks_beside"]] == [2, 2]
    assert (len(update_s["each_without"]), len(update_s["each_beside"])) == (9, 4)
    assert (len(background["wait_s"]), len(background["then_written_in_s"]), len(result["at_once"]["wait_s"])) == (1, 2, 1)
    assert result["bytes"] > 1_000_000


def test_one_save_in_the_background_is_too_few(capsys):
    with pytest.raises(SystemExit):
        saves.main([*SMALL, "--saves", "1"])
    assert "--saves 2 or more" in capsys.readouterr().err


def test_the_slowdown_is_of_all_updates_beside_a_save_against_all_others():
    result = saves._compared([[1.0, 2.0, 3.0], [2.0]], [[4.0], [1.0, 1.0, 4.0]])
    assert result["slowdown"] == 0.25
    assert (result["update_s"]["without"], result["update_s"]["beside_a_save"]) == (2.0, 2.5)
    assert result["update_s"]["blocks_beside"] == [
        {"updates": 1, "mean": 4.0, "median": 4.0},
        {"updates": 3, "mean": 2.0, "median": 1.0},
    ]
