"""Steps of real runs, done again from one file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import NumericalError
from lockstep.tools.replay import capsule as capsule_command
from lockstep.tools.replay import command as replay
from lockstep.tools.replay.command import first_difference
from lockstep.trainer import main_ppo, recipes
from lockstep.workers.engine.base import TrainEngine


def sft(folder: Path, task: Any, **changes: Any) -> int:
    rows = [
        {"prompt": word, "completion": word[::-1]}
        for word in ("abc", "face", "bed", "dig", "chad", "jig", "hi", "ace", "cab", "gab")
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {
        "model.path": task.model, "data.train_files": folder / "train.jsonl", "data.max_length": 32, "data.train_batch_size": 2,
        "optim.lr": 1e-2, "trainer.total_training_steps": 5, "trainer.save_freq": 2, "trainer.default_local_dir": folder / "run",
    }  # fmt: skip
    return recipes.SFT.main([f"{key}={value}" for key, value in (arguments | changes).items()])


def test_steps_come_out_as_they_were_without_the_runs_files_and_a_change_is_named(
    embedded_task: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "a-very-secret-value")
    validation = {
        "data.val_files": tmp_path / "train.jsonl",
        "trainer.best_metric": "val/nll",
        "trainer.val_before_train_samples": 2,
    }
    assert sft(tmp_path, embedded_task, **{"trainer.project_name": "a-very-secret-value"}, **validation) == 0
    assert capsule_command.main([str(tmp_path / "run"), "--step", "4"]) == 0
    file = tmp_path / "run" / "capsule_step_4.json"
    assert capsule_command.main([str(tmp_path / "run"), "--step", "9"]) == 1
    assert "has no step 9" in capsys.readouterr().err
    capsule = json.loads(file.read_text())
    assert (capsule["from_step"], [row["step"] for row in capsule["metrics"]], len(capsule["rows"])) == (2, [3, 4], 4)
    assert capsule["versions"]["torch"]
    assert "a-very-secret-value" not in file.read_text()
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "run" / "global_step_2", moved)
    (tmp_path / "train.jsonl").unlink()
    capsys.readouterr()
    assert replay.main([str(file)]) == 1
    assert "name the checkpoint of step 2 with --weights" in capsys.readouterr().err
    assert replay.main([str(file), "--weights", str(moved)]) == 0
    assert "step 3: as it was\nstep 4: as it was" in capsys.readouterr().out.replace("\r", "")
    capsule["metrics"][1]["train/nll"] += 0.01
    file.write_text(json.dumps(capsule))
    assert replay.main([str(file), "--weights", str(moved), "trainer.device=cpu"]) == 1
    assert "step 4 differs: train/nll is" in capsys.readouterr().out
    assert replay.main([str(file), "--weights", str(tmp_path / "run" / "global_step_4")]) == 1
    assert "another checkpoint" in capsys.readouterr().err
    assert replay.main([str(tmp_path / "run" / "config.yaml")]) == 1
    assert "is not a capsule" in capsys.readouterr().err


def test_a_step_that_is_not_finite_leaves_its_capsule(
    embedded_task: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = TrainEngine.forward_backward, []

    def forward_backward(self: TrainEngine, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise NumericalError("the loss is nan")
        return plain(self, *arguments, **options)

    monkeypatch.setattr(TrainEngine, "forward_backward", forward_backward)
    assert sft(tmp_path, embedded_task) == 1
    file = tmp_path / "run" / "capsule_step_2.json"
    assert f"lockstep replay {file}" in capsys.readouterr().out
    assert json.loads(file.read_text())["failure"] == "the loss is nan"
    calls.clear()
    assert replay.main([str(file)]) == 0
    assert "step 2 fails here too: the loss is nan" in capsys.readouterr().out
    monkeypatch.setattr(TrainEngine, "forward_backward", plain)
    assert replay.main([str(file)]) == 1
    assert "step 2 does not fail here; there it was: the loss is nan" in capsys.readouterr().out


def test_a_step_of_ppo_generates_the_same_responses(embedded_task: Any, tmp_path: Path, capsys: Any) -> None:
    arguments = [
        f"actor_rollout_ref.model.path={embedded_task.model}", f"data.train_files={embedded_task.train_file}", "data.val_files=null",
        "data.max_prompt_length=16", "data.max_response_length=12", "data.train_batch_size=8", "trainer.save_freq=1",
        "actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=grpo", "trainer.total_training_steps=3",
        f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu",
    ]  # fmt: skip
    written = tmp_path / "written"
    arguments += [f"trainer.rollout_data_dir={written}", f"trainer.record_batch_dir={written}", "trainer.record_batch_freq=1"]
    assert main_ppo.main(arguments) == 0
    shutil.rmtree(written)
    assert capsule_command.main([str(tmp_path), "--step", "3"]) == 0
    shutil.rmtree(tmp_path / "global_step_2")  # two steps then, from the first checkpoint
    assert capsule_command.main([str(tmp_path), "--step", "3", "--out", str(tmp_path / "two.json")]) == 0
    capsys.readouterr()
    assert replay.main([str(tmp_path / "two.json")]) == 0
    said = capsys.readouterr().out
    assert "step 2: as it was\nstep 3: as it was" in said
    assert "the checkpoint saw" not in said  # rows that are not read are fillers
    assert not written.exists()
    # Of a run of several processes, whose capsule says one too.
    capsule = json.loads((tmp_path / "two.json").read_text())
    assert "global_seqlen/min" in capsule["metrics"][-1]
    capsule["metrics"][-1]["global_seqlen/min"] /= 2
    (tmp_path / "of_two.json").write_text(json.dumps(capsule))
    assert replay.main([str(tmp_path / "of_two.json")]) == 0
    said = capsys.readouterr().out
    assert "step 3: as it was" in said
    assert "and different: global_seqlen/min\n" in said
    # The model lies elsewhere on another machine. That is said, and no setting of the run that must stay.
    moved = shutil.copytree(embedded_task.model, tmp_path / "moved")
    assert replay.main([str(tmp_path / "two.json"), f"actor_rollout_ref.model.path={moved}"]) == 0
    assert "step 2: as it was\nstep 3: as it was" in capsys.readouterr().out


@pytest.mark.parametrize("most", [0, 7])  # 0: the batches of an epoch
def test_a_step_that_took_several_batches_of_prompts_is_replayed_with_their_rows(
    embedded_task: Any, tmp_path: Path, capsys: Any, most: int
) -> None:
    arguments = [
        f"actor_rollout_ref.model.path={embedded_task.model}", f"data.train_files={embedded_task.train_file}", "data.val_files=null",
        "data.max_prompt_length=16", "data.max_response_length=12", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.temperature=0.5", "algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true",
        f"algorithm.filter_groups.max_num_gen_batches={most}", "trainer.total_training_steps=2", "trainer.save_freq=2",
        f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu",
    ]  # fmt: skip
    assert main_ppo.main(arguments) == 0
    assert capsule_command.main([str(tmp_path), "--step", "2"]) == 0
    capsule = json.loads((tmp_path / "capsule_step_2.json").read_text())
    taken = sum(row["training/num_gen_batches"] for row in capsule["metrics"])
    assert taken > 2
    assert len(capsule["rows"]) == 4 * taken
    capsys.readouterr()
    assert replay.main([str(tmp_path / "capsule_step_2.json")]) == 0
    assert "step 1: as it was\nstep 2: as it was" in capsys.readouterr().out


def test_a_run_that_keeps_its_best_checkpoint_by_a_validation_is_replayed_without_one(
    embedded_task: Any, tmp_path: Path, capsys: Any
) -> None:
    validated = {"data.val_files": tmp_path / "train.jsonl", "trainer.best_metric": "val/nll", "trainer.best_is_lowest": "true"}
    assert sft(tmp_path, embedded_task, **validated, **{"trainer.test_freq": 1, "trainer.total_training_steps": 2}) == 0
    assert capsule_command.main([str(tmp_path / "run"), "--step", "2"]) == 0
    capsys.readouterr()
    assert replay.main([str(tmp_path / "run" / "capsule_step_2.json")]) == 0
    assert "step 2: as it was" in capsys.readouterr().out


def test_the_first_metric_that_differs_is_named() -> None:
    was = {"step": 1, "a": 1.0, "timing_s/step": 3.0, "b": 2.0, "c": float("nan")}
    assert first_difference(was, {"a": 1.00001, "b": 2.0, "c": float("nan")}, 1e-4) is None
    assert first_difference(was, {"a": 1.0, "b": 2.1, "c": 0.0}, 1e-4) == "b is 2.1, and was 2.0"
    assert first_difference(was, {"a": 1.0, "c": 0.0}, 1e-4) == "b is missing; it was 2.0"


def test_what_depends_on_the_number_of_ranks_or_on_the_machine_is_not_compared() -> None:
    was = {"step": 1, "a": 1.0, "global_seqlen/min": 3118, "perf/x": 1.0, "agent/environment_s": 2.0, "memory/y": 1.0, "time": 5.0}
    assert first_difference(was, {"a": 1.0, "global_seqlen/min": 6335}, 1e-4) is None


PARTS = ("recipe", "config", "step", "from_step", "weights", "keys", "rows", "metrics", "failure")
WRONG = (None, 3, -1, 1.5, "word", [], {}, [1], {"a": 1}, {"0": 1}, {"-1": {}}, [[]], True, {"trainer": None}, 10**30)


@pytest.mark.parametrize(
    "part", [*PARTS, "episodes", "keys.seed", "keys.left_out", "keys.num_rows", "keys.num_used", "weights.name"]
)
def test_a_malformed_capsule_is_an_error_of_one_line(
    part: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(replay.PROGRAMS, "SFTConfig", "tests_have_no_such_program")  # a malformed capsule does not get so far
    good: dict[str, Any] = {
        "lockstep_capsule": 1, "recipe": "SFTConfig", "config": {"trainer": {}}, "step": 2, "from_step": 0, "weights": None,
        "keys": {"seed": 0, "left_out": [], "num_rows": 1, "num_used": 1}, "rows": {"0": {"prompt": "a", "completion": "b"}},
        "metrics": [{"step": 1, "x": 1.0}], "episodes": {"kinds": {}, "played": []}, "failure": None,
    }  # fmt: skip
    file, section, (outer, dot, inner) = tmp_path / "capsule.json", {}, part.partition(".")
    section = dict(good[outer] or {"name": "a", "sha256": "b"}) if dot else good
    for value in ("missing", *WRONG):
        changed = {name: old for name, old in section.items() if name != (inner or outer) or value != "missing"}
        if value != "missing":
            changed[inner or outer] = value
        file.write_text(json.dumps(good | {outer: changed} if dot else changed))
        try:
            assert replay.main([str(file)]) == 1
        except ModuleNotFoundError:  # read to its end
            continue
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1 or "the capsule names" in said


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[]", "null", '"a"', "\x00", '{"lockstep_capsule": [1]}', "9" * 5000])
def test_a_file_that_is_no_capsule_is_an_error_of_one_line(text: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.json").write_text(text)
    assert replay.main([str(tmp_path / "a.json")]) == 1
    assert "is not a capsule" in capsys.readouterr().err


def test_numbers_beyond_floats_in_a_capsule_differ_and_do_not_end_the_replay() -> None:
    assert first_difference({"step": 1, "a": float("inf")}, {"a": 1.0}, 1e-4) == "a is 1.0, and was inf"
