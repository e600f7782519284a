"""`lockstep distill` as a user runs it, on the embedded task's model: it learns, resumes to the bit, and says what is wrong in one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stages import WORDS, metrics, run_main, write_examples
from safetensors.torch import load_file

from lockstep.trainer import recipes


@pytest.fixture(scope="module")
def teacher(embedded_task: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen some words more than the student."""
    folder = tmp_path_factory.mktemp("teacher")
    arguments = {
        "model.path": embedded_task.model, "data.train_files": write_examples(folder, WORDS * 4), "data.max_length": 32,
        "data.train_batch_size": 12, "optim.lr": 3e-3, "trainer.default_local_dir": folder / "run",
        "trainer.total_training_steps": 30,
    }  # fmt: skip
    assert run_main(recipes.SFT.main, arguments) == 0
    return folder / "run" / "global_step_30" / "actor"


@pytest.fixture
def arguments(embedded_task: Any, teacher: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.path": embedded_task.model,
        "teacher.path": teacher,
        "data.train_files": write_examples(tmp_path, WORDS * 4),
        "data.max_length": 32,
        "data.train_batch_size": 12,
        "distill.max_response_length": 12,
        "optim.lr": 3e-3,
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.total_training_steps": 4,
    }


def distill(arguments: dict[str, Any], **changes: Any) -> int:
    return run_main(recipes.DISTILL.main, arguments | changes)


@pytest.mark.parametrize("rank", [0, 4])
def test_it_learns_from_given_and_own_answers(
    arguments: dict[str, Any], embedded_task: Any, tmp_path: Path, rank: int, capsys: Any
) -> None:
    more = {"data.val_files": write_examples(tmp_path, ["bed", "jag", "ahi"], "val.jsonl"), "sampled.files": embedded_task.val_file}
    more |= {"sampled.max_samples": 8, "sampled.max_prompt_length": 16, "sampled.max_response_length": 12, "model.lora_rank": rank}
    assert distill(arguments, **more, **{"trainer.total_training_steps": 20, "trainer.test_freq": 10}) == 0
    rows = metrics(tmp_path / "run")
    steps, last = [row for row in rows if "train/kl" in row], rows[-1]
    assert steps[-1]["train/kl"] < 0.5 * steps[0]["train/kl"]
    assert steps[-1]["train/agreement"] > steps[0]["train/agreement"]
    assert {"train/nll", "train/token_accuracy", "train/on_policy_length", "train/grad_norm"} <= set(steps[0])
    assert {"val/kl", "val/nll", "val/agreement", "val-core/lockstep/reverse/reward/mean@1"} <= set(last)
    assert "val/kl" in capsys.readouterr().out.rsplit("done: 20 steps", 1)[1]


@pytest.mark.parametrize(("beta", "top_k"), [(0.0, "null"), (0.5, "null"), (1.0, 3)])
def test_a_self_teacher_teaches_exactly_nothing(
    arguments: dict[str, Any], embedded_task: Any, tmp_path: Path, beta: float, top_k: Any
) -> None:
    own = {"teacher.path": embedded_task.model, "distill.beta": beta, "distill.top_k": top_k, "optim.weight_decay": 0.0}
    assert distill(arguments, **own, **{"trainer.total_training_steps": 2}) == 0
    for row in metrics(tmp_path / "run"):
        assert row["train/kl"] == row["train/grad_norm"] == 0
        assert row["train/agreement"] == 1
    before, after = (Path(f) / "model.safetensors" for f in (embedded_task.model, tmp_path / "run" / "global_step_2" / "actor"))
    assert all(torch.equal(tensor, load_file(after)[name]) for name, tensor in load_file(before).items())


def test_the_share_of_own_answers_is_kept_over_the_steps(arguments: dict[str, Any], tmp_path: Path) -> None:
    for share, measured in ((0.0, {"train/nll"}), (1.0, {"train/on_policy_length"})):
        folder = tmp_path / f"run{share}"
        assert distill(arguments, **{"distill.on_policy_share": share, "trainer.default_local_dir": folder}) == 0
        for row in metrics(folder):
            assert {"train/nll", "train/on_policy_length"} & set(row) == measured


def test_a_run_that_is_cut_in_two_ends_with_the_same_bits(arguments: dict[str, Any], tmp_path: Path) -> None:
    halves = arguments | {"trainer.save_freq": 2}
    assert distill(halves) == 0
    shutil.copytree(tmp_path / "run", tmp_path / "halves")
    shutil.rmtree(tmp_path / "halves" / "global_step_4")
    assert distill(halves, **{"trainer.default_local_dir": tmp_path / "halves"}) == 0
    assert metrics(tmp_path / "halves") == metrics(tmp_path / "run")
    one, other = (load_file(tmp_path / run / "global_step_4" / "actor" / "model.safetensors") for run in ("run", "halves"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_processes_train_as_one(arguments: dict[str, Any], tmp_path: Path, ray_cluster: Any) -> None:
    assert distill(arguments) == 0
    assert distill(arguments, **{"trainer.n_gpus_per_node": 2, "trainer.default_local_dir": tmp_path / "two"}) == 0
    for one, two_ranks in zip(metrics(tmp_path / "run"), metrics(tmp_path / "two"), strict=True):
        for name in ("train/kl", "train/nll", "train/agreement"):
            assert two_ranks[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name


def test_how_rows_are_cut_and_where_the_teacher_rests_changes_nothing(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distill(arguments) == 0
    monkeypatch.setattr("lockstep.models.chunked_kl.MAX_LOGITS", {"cpu": 64})
    cut = {"engine.micro_batch_size_per_gpu": 5, "teacher.param_offload": True, "trainer.default_local_dir": tmp_path / "cut"}
    assert distill(arguments, **cut) == 0
    for one, other in zip(metrics(tmp_path / "run"), metrics(tmp_path / "cut"), strict=True):
        assert other["train/kl"] == pytest.approx(one["train/kl"], rel=1e-5)
        assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"teacher.path": ""}, "teacher.path is empty"),
        ({"teacher.path": "/nowhere/teacher"}, "/nowhere/teacher"),
        ({"distill.beta": 2}, "distill.beta=2"),
        ({"distill.temperature": 0}, "distill.temperature=0"),
        ({"distill.top_k": 0}, "distill.top_k=0"),
        ({"distill.max_response_length": 4000}, "distill.max_response_length=4032"),
        ({"engine.strategy": "megatron", "engine.megatron.pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2"),
        ({"engine.fsdp_config.ulysses_sequence_parallel_size": 2}, "engine.fsdp_config.ulysses_sequence_parallel_size=2"),
        ({"engine.max_token_len_per_gpu": 40}, "engine.max_token_len_per_gpu=40"),
        ({"data.max_length": 6}, "train.jsonl row"),
        ({"distill.lambda": 1}, "unknown key 'distill.lambda'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_work_is_one_line_before_a_model_is_loaded(
    arguments: dict[str, Any], change: dict[str, Any], said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.workers.engine.spec.load_on_meta", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr("lockstep.workers.engine.spec.load_model", lambda *_: pytest.fail("a model was loaded"))
    assert distill(arguments, **change) == 1
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
