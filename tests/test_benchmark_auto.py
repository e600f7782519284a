"""benchmarks/auto.py and auto_steps.py: which lines are measured, and what is made of their times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import auto, auto_steps, forked
from lockstep.planner.choices import RolloutNumbers


def test_lines_that_come_to_the_same_are_measured_once_and_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    times = iter([2.0, 4.0, 1.0, 8.0, 3.0, 2.0])  # of two engines in turn

    def generate(engine: object, load: object, sampling: object) -> tuple[float, int]:
        calls.append(engine.config.max_num_seqs)  # type: ignore[attr-defined]
        return next(times), 120

    monkeypatch.setattr(auto, "_generate", generate)
    hand = ["1024, 8k, 0.5", "2048, 8k, 0.8"]  # 16 requests: as many seats, but another share of the memory
    auto.main(
        ["--shapes", "tiny", "--prompts", "2", "--rounds", "3", "--device", "cpu", "--results", str(tmp_path), "--hand", *hand]
    )
    assert len(calls) == 6
    assert calls[:2] * 3 == calls
    (file,) = tmp_path.glob("auto_*.json")
    rows = {row["line"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["auto", *hand]
    assert rows["auto"]["all_seconds"] == rows["1024, 8k, 0.5"]["all_seconds"] != rows["2048, 8k, 0.8"]["all_seconds"]
    assert {row["seconds"] for row in rows.values()} == {2.0, 4.0}
    assert {row["tokens_per_s"] for row in rows.values()} == {60, 30}


def test_seats_beyond_the_requests_make_no_other_line() -> None:
    assert auto._key(RolloutNumbers(2048, 8192, 0.8), 100) == auto._key(RolloutNumbers(512, 8192, 0.9), 100)
    assert auto._key(RolloutNumbers(2048, 8192, 0.8), 100) != auto._key(RolloutNumbers(64, 8192, 0.8), 100)


def test_the_table_of_steps_says_how_slow_the_first_is_and_who_is_best() -> None:
    rows = [
        {"line": "auto", "first_s": {"step": 6.0, "gen": 5.0}, "then_s": {"step": 4.0, "gen": 3.0}},
        {"line": "by hand", "first_s": {"step": 9.0, "gen": 5.0}, "then_s": {"step": 3.0, "gen": 2.0}},
    ]
    first, second = auto_steps._table(rows).splitlines()[1:]
    assert first.split() == ["auto", "6.00", "4.00", "3.00", "1.50", "75.0%"]
    assert second.split()[-2:] == ["3.00", "100.0%"]


def test_a_command_that_fails_says_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="unknown command 'grpoo'"):
        forked.finish(["grpoo"], tmp_path)
