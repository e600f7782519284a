"""Distillation reaches its teacher: the embedded task's student, in a fifth of the steps of PPO's demo (100)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lockstep.trainer import recipes

ACCURACY = "val-core/lockstep/reverse/reward/mean@1"


def run(main: Any, folder: Path, arguments: dict[str, Any]) -> tuple[float, float]:
    """Accuracy on the 256 held-out words before and after."""
    assert main.main([f"{key}={value}" for key, value in (arguments | {"trainer.default_local_dir": folder}).items()]) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, last = (row[ACCURACY] for row in rows if ACCURACY in row)
    return first, last


def test_the_student_is_within_two_hundredths_of_its_teacher_in_a_fifth_of_ppos_steps(embedded_task: Any, tmp_path: Path) -> None:
    words = pq.read_table(embedded_task.train_file).to_pylist()
    answers = [{"role": "assistant", "content": row["reward_model"]["ground_truth"] + "<eos>"} for row in words]
    examples = [{"messages": [*row["prompt"], answer]} for row, answer in zip(words, answers, strict=True)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
    common = {
        "model.path": embedded_task.model, "data.train_files": tmp_path / "train.jsonl", "data.max_length": 32,
        "sampled.files": embedded_task.val_file, "sampled.max_prompt_length": 16, "sampled.max_response_length": 12,
        "trainer.total_epochs": 20,
    }  # fmt: skip
    supervised = {"data.train_batch_size": 128, "optim.lr": 3e-3, "trainer.total_training_steps": 30}
    start, of_teacher = run(recipes.SFT, tmp_path / "teacher", common | supervised)
    distilled = {
        "teacher.path": tmp_path / "teacher" / "global_step_30" / "actor", "data.train_batch_size": 1024, "optim.lr": 2e-3,
        "optim.min_lr_ratio": 0.02, "distill.beta": 0.0, "distill.on_policy_share": 0.1, "distill.max_response_length": 12,
        "trainer.total_training_steps": 20,
    }  # fmt: skip
    _, of_student = run(recipes.DISTILL, tmp_path / "student", common | distilled)
    assert of_teacher > start + 0.4
    assert of_student >= of_teacher - 0.02
