"""benchmarks/learn.py: what it reads from the runs' metrics, and that runs at once end when the time is up."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import learn

_CORE, _AUX = "val-core/gsm8k/acc/mean@4", "val-aux/gsm8k/acc/mean@4"


def write_metrics(folder: Path, rewards: list[float]) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, _CORE: 0.05, f"{_AUX}/low": 0.04, f"{_AUX}/high": 0.06}]
    rows += [{"step": i + 1, learn.REWARD: reward, "timing_s/step": 3.0 - (i > 0)} for i, reward in enumerate(rewards)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "crit')


def test_a_run_that_is_not_over_is_read_as_far_as_it_has_come(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.04, 0.06, 0.05, 0.07, 0.08, 0.06, 0.10, 0.11, 0.09])
    found = learn._result(tmp_path, ("grpo", 1))
    assert found["validation"] == [{"step": 0, "metric": "mean@4", "accuracy": 0.05, "interval": [0.04, 0.06]}]
    assert (found["first_step_s"], found["step_s"], len(found["rewards"])) == (3.0, 2.0, 9)
    # Welch by hand: means 0.05 and 0.10, variances 1e-4 of 3 steps each, so 4 degrees of freedom: 2.776 * sqrt(2e-4 / 3).
    low, high = found["rise"]["interval"]
    assert found["rise"]["by"] == pytest.approx(0.05)
    assert (low, high) == pytest.approx((0.05 - 0.02267, 0.05 + 0.02267), abs=2e-4)
    assert "0.050 [0.040, 0.060]" in learn._table([found])


def test_too_few_steps_have_no_rise(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.04, 0.06])
    assert learn._result(tmp_path, ("grpo", 1))["rise"] is None


def test_steps_that_are_all_equal_have_no_rise(tmp_path: Path) -> None:
    """A reward that is 0 throughout: an interval of no width would be a claim."""
    write_metrics(tmp_path, [0.0] * 9)
    assert learn._result(tmp_path, ("grpo", 1))["rise"] is None


def grown(seed: int, *accuracies: tuple[int, float], algorithm: str = "grpo") -> dict[str, Any]:
    validation = [{"step": step, "accuracy": accuracy, "interval": [0.0, 1.0]} for step, accuracy in accuracies]
    return {"algorithm": algorithm, "seed": seed, "rewards": [0.1], "rise": None, "validation": validation} | dict.fromkeys(
        ("first_step_s", "step_s", "seconds"), 1.0
    )


def test_seeds_grow_from_the_first_to_the_last_step_that_all_of_them_have() -> None:
    """One has come further, one was validated before the first step only: it has not grown by 0."""
    runs = [grown(0, (0, 0.10), (10, 0.14), (20, 0.30)), grown(1, (0, 0.12), (10, 0.14)), grown(2, (0, 0.11))]
    found = learn._over_seeds(runs)["grpo"]
    assert (found["seeds"], found["steps"], found["growth"]) == (2, 10, pytest.approx(0.03))
    # By hand: the mean of 0.04 and 0.02, whose standard error is 0.01, and 1 degree of freedom.
    assert found["interval"] == pytest.approx([0.03 - 0.12706, 0.03 + 0.12706], abs=1e-4)
    assert "grew by 0.030 [-0.097, 0.157] in 10 steps, 2 seed(s)" in learn._table(runs)


def test_seeds_that_grow_alike_have_no_interval() -> None:
    found = learn._over_seeds([grown(seed, (0, 0.0), (5, 0.0)) for seed in range(3)])["grpo"]
    assert (found["seeds"], found["growth"], found["interval"]) == (3, 0.0, None)


def test_an_algorithm_that_was_validated_once_has_no_growth() -> None:
    runs = [grown(0, (0, 0.1), algorithm="dapo"), grown(0, algorithm="rloo"), grown(0, (0, 0.1), (9, 0.2))]
    found = learn._over_seeds(runs)
    assert (found["dapo"]["growth"], found["rloo"]["growth"]) == (None, None)
    json.loads(json.dumps(found, allow_nan=False))
    assert "dapo: not validated twice" in learn._table(runs)
    assert "grew by 0.100 (no interval: no seeds that differ) in 9 steps" in learn._table(runs)


def test_a_folder_of_another_command_is_an_error(tmp_path: Path) -> None:
    """Its numbers would stand beside this command's arguments."""
    learn._claim(tmp_path / "grpo_0", ["grpo", "optim.lr=1e-5"])
    learn._claim(tmp_path / "grpo_0", ["grpo", "optim.lr=1e-5"])
    with pytest.raises(SystemExit, match=r"a run of another command \(optim.lr=1e-5\): choose another --out"):
        learn._claim(tmp_path / "grpo_0", ["grpo", "optim.lr=2e-5"])


def test_runs_at_once_end_with_the_time_and_are_saved_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    shares: list[float | None] = []
    saved: list[float] = []

    def start(words: list[str], folder: Path, memory_share: float | None, threads: int | None) -> Any:
        write_metrics(folder, [0.04])
        (folder / "output.txt").write_text("out of memory")
        shares.append(memory_share)
        started.append(multiprocessing.get_context("spawn").Process(target=eval, args=(words[0],)))
        started[-1].start()
        return started[-1]

    monkeypatch.setattr(learn.forked, "start", start)
    monkeypatch.setattr(learn, "_POLL_S", 0.05)
    options = argparse.Namespace(device="cuda", out=tmp_path, tiny=False, memory=0.9)
    jobs: dict[learn.Run, list[str]] = {("grpo", 0): ["__import__('time').sleep(600)"], ("rloo", 0): ["exit(3)"]}
    end = time.monotonic() + 2.0
    learn._run_all(options, jobs, end, lambda: saved.append(time.monotonic()))
    assert all(process.exitcode for process in started)
    assert saved
    assert saved[0] < end
    assert shares == [0.45, 0.45]
