"""The command on a program that only counts, so that a kill costs nothing; the comparison on runs that differ in one place."""

import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep import cli
from lockstep.checkpoint import folders
from lockstep.errors import DataError, ResourceError
from lockstep.models.weight_files import write_weights
from lockstep.tools import verify_resume
from lockstep.tools.verify_resume import differences, end_of

PROGRAM = """
import json, os, sys, time
from pathlib import Path
from lockstep.checkpoint import folders

keys = dict(word.split("=", 1) for word in sys.argv[2:])
if keys.get("fails"):
    sys.exit("no such model")
run_dir = Path(keys["trainer.default_local_dir"])
newest = folders.newest(run_dir)
step = folders.read_state(newest)["global_steps"] if newest else 0
value = json.loads((newest / "value.json").read_text()) if newest and keys["forgets"] == "no" else 0
run_dir.mkdir(exist_ok=True)
lines = (run_dir / "metrics.jsonl").read_text().splitlines()[:step] if newest else []
while step < int(keys["trainer.total_training_steps"]):
    time.sleep(0.1)
    step, value = step + 1, value + 1
    lines.append(json.dumps({"step": step, "time": time.time(), "value": value}))
    (run_dir / "metrics.tmp").write_text("".join(line + chr(10) for line in lines))
    (run_dir / "metrics.tmp").rename(run_dir / "metrics.jsonl")
    draft = folders.make_draft(run_dir, step)
    (draft / "value.json").write_text(json.dumps(value))
    folders.write_state(draft, {"global_steps": step})
    folders.publish(draft, {})
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "counting_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setattr(verify_resume, "PROGRAM", "counting_program")
    return tmp_path


def test_a_run_that_resumes_is_verified_and_one_that_forgets_is_found(program, capsys):
    run = lambda forgets: verify_resume.verify("ppo", [f"forgets={forgets}"], program / forgets, 6, 2, random.Random(0))  # noqa: E731
    assert run("no") == 0
    output = capsys.readouterr().out
    assert output.count("killed: ") == 2
    assert "ended as the one that was not: every file and every metric, to the bit" in output
    assert run("yes") == 1
    output = capsys.readouterr().out
    assert "metrics of line" in output
    assert "it is the resume" in output


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 9))
def test_kills_are_spread_over_the_steps_and_none_is_after_the_last(steps, num_kills, seed):
    moments = list(verify_resume._moments(steps, num_kills, 60.0, 2.0, random.Random(seed)))
    after = [moment.after_steps for moment in moments]
    assert len(after) == num_kills
    assert after == sorted(after)
    assert after[-1] < steps
    assert all(abs(step - i * steps / num_kills) <= steps / num_kills + 1 for i, step in enumerate(after))
    assert all(0 <= moment.seconds <= (2.0 if moment.after_steps else 60.0) for moment in moments)


def test_kills_that_come_too_late_prove_nothing_and_it_is_said(program, monkeypatch, capsys):
    def killed(words, run_dir, moment):  # the run is always done when it is killed
        plain(words, run_dir, None)
        return moment is not None

    plain = verify_resume._killed
    monkeypatch.setattr(verify_resume, "_killed", killed)
    assert verify_resume.verify("ppo", ["forgets=no"], program / "late", 2, 2, random.Random(0)) == 1
    output = capsys.readouterr().out
    assert "2 of them after the last step" in output
    assert "--steps" in output


def test_a_run_that_fails_by_itself_is_no_verdict(program):
    with pytest.raises(ResourceError, match="exit code 1:\nno such model"):
        verify_resume.verify("ppo", ["fails=yes"], program / "x", 6, 2, random.Random(0))


def test_the_command_line():
    assert cli.COMMANDS["verify-resume"][0] == "lockstep.tools.verify_resume"
    options, command, keys = verify_resume._read(["--kills", "2", "sft", "--config", "my.yaml", "data.train_files=a"])
    assert (options.kills, command, keys) == (2, "sft", ["--config", "my.yaml", "data.train_files=a"])
    assert verify_resume._read(["trainer.seed=1", "--steps=3"])[1:] == ("ppo", ["trainer.seed=1"])
    assert verify_resume._read(["dr-grpo", "trainer.seed=1"])[1:] == ("dr_grpo", ["trainer.seed=1"])


@pytest.mark.parametrize("option", ["--kills", "--steps"])
def test_no_kill_and_no_step_would_prove_nothing(option, capsys):
    assert verify_resume.main([option, "0"]) == 1
    assert option in capsys.readouterr().err


def test_an_algorithm_is_run_as_its_own_command_and_another_word_is_refused_at_once(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(verify_resume, "_run", lambda words, run_dir: seen.append(words) or sys.exit(0))
    with pytest.raises(SystemExit):
        verify_resume.main(["--folder", str(tmp_path), "grpo", "trainer.seed=1"])
    assert seen[0][1:5] == ["-m", "lockstep.cli", "grpo", "trainer.seed=1"]
    # The folders of the user's own run stay as they are; other recipes do not know these keys.
    folders_of_rl = {"trainer.rollout_data_dir=null", "trainer.validation_data_dir=null", "trainer.record_batch_dir=null"}
    assert folders_of_rl <= set(seen[0])
    assert "trainer.best_metric=null" in seen[0], "nothing is validated"
    with pytest.raises(SystemExit):
        verify_resume.main(["--folder", str(tmp_path / "b"), "sft", "trainer.seed=1"])
    assert seen[1][1:5] == ["-m", "lockstep.cli", "sft", "trainer.seed=1"]
    assert not folders_of_rl & set(seen[1])
    # Nothing is validated, so no checkpoint can be the best by a validation.
    assert {"trainer.test_freq=0", "trainer.best_metric=null"} <= set(seen[0]) & set(seen[1])
    assert verify_resume.main(["gropo", "trainer.seed=1"]) == 1
    assert "error: 'gropo' is neither key=value nor a training command: ppo, sft" in capsys.readouterr().err


def write_run(run_dir: Path, weight: float = 1.0, reward: float = 0.5) -> Path:
    draft = folders.make_draft(run_dir, 1)
    tensors = {"a": torch.ones(3), "b": torch.tensor([1.0, weight])}
    write_weights(draft / "model.safetensors", {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, tensors.items())
    folders.write_state(draft, {"global_steps": 1})
    folders.publish(draft, {})
    times = ("time", "timing_s/step", "perf/throughput", "agent/environment_s", "agent/environment_s/max", "agent/wait_s")
    lines = [{"step": 1, **{name: random.random() for name in times}, "reward": reward}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_the_first_thing_that_differs_is_named(tmp_path):
    same = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert list(differences(*same)) == []
    other = write_run(tmp_path / "c", weight=1.5, reward=0.25)
    metrics, weights = differences(same[0], other)
    assert metrics == "metrics of line 1 (step 1): 1 differ, first reward 0.5 and 0.25"
    assert weights == "global_step_1/model.safetensors: b differs in 1 of 2 numbers, by at most 0.5"
    (other / "global_step_1" / "model.safetensors").unlink()
    with pytest.raises(DataError, match="missing"):
        end_of(other)
    shutil.rmtree(other / "global_step_1")
    with pytest.raises(DataError, match="no checkpoint"):
        end_of(other)
