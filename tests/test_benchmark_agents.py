"""benchmarks/agents.py runs on a CPU and writes what it promises."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import agents


def test_the_benchmark_says_what_reuse_saves_and_how_busy_slow_environments_leave_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "LONGEST_S", 0.1)
    small = ["--turns", "3", "--observation", "40", "--turn-tokens", "4", "--long-turn-tokens", "6"]
    agents.main(
        ["--shape", "tiny", "--device", "cpu", "--episodes", "3", "--check", "2", "--waiting", "4", "--repeats", "1", *small]
        + ["--out", str(tmp_path)]
    )
    (file,) = tmp_path.glob("agents_tiny_*.json")
    result = json.loads(file.read_text())
    assert result["check"]["equal_episodes"] == 2
    (reuse,) = result["reuse"]
    assert reuse["equal_tokens"] == reuse["policy_tokens"]
    assert 3 * 3 * 2 <= reuse["policy_tokens"] <= 3 * 3 * 6
    slow = result["environments"]["slow"]
    assert result["environments"]["equal_episodes"] == 4
    assert 0 < slow["busy"] <= 1
    assert slow["window_s"] <= slow["seconds"]
    assert slow["late_median_s"] > 0
    assert "times as fast" in capsys.readouterr().out
