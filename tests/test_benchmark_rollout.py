"""benchmarks/rollout.py runs on a CPU and writes what it promises; the loads are those that other engines were measured on."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.rollout import main
from benchmarks.workload import LOADS


@pytest.mark.parametrize(
    ("name", "requests", "tokens"), [("fixed", 1024, 524_288), ("gsm8k_like", 1024, 261_300), ("long_tail", 256, 322_845)]
)
def test_a_load_has_the_tokens_that_published_numbers_were_measured_with(name: str, requests: int, tokens: int) -> None:
    load = LOADS[name]()
    assert len(load.prompts) == len(load.lengths) == requests
    assert load.num_tokens == tokens


def test_the_benchmark_writes_rates_versions_and_the_distance_to_the_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--shape", "tiny", "--device", "cpu", "--load", "gsm8k_like", "--prompts", "1", "--n", "2", "--repeats", "1"]
    main([*small, "--trainer-check", "2", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("rollout_tiny_*.json")
    result = json.loads(file.read_text())
    (row,) = result["rows"]
    assert row["tokens_per_s"] > 0
    assert row["requests"] == 2
    assert row["trainer_log_prob_difference"]["mean"] < 1e-5
    assert {"date", "hardware", "versions", "commit", "first_token_s"} <= result.keys()
    assert "tokens/s" in capsys.readouterr().out
