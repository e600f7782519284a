"""`lockstep reward-model` as a user runs it, on the embedded task's words: a word written backwards is chosen, one that is copied rejected."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run import roles, train
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.data.pairs import PairDataset
from lockstep.data.scored_text import ScoredText
from lockstep.trainer import main_reward_model
from lockstep.utils.tokenizer import hf_tokenizer


def write_pairs(path: Path, count: int, seed: int, **more: Any) -> Path:
    """Words that read otherwise backwards, written backwards or copied."""
    draw, rows = random.Random(seed), []
    while len(rows) < count:
        word = "".join(draw.choices("abcdefghij", k=draw.randint(3, 6)))
        if word != word[::-1]:
            rows.append({"prompt": word, "chosen": word[::-1], "rejected": word} | more)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def arguments(embedded_task: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pairs")
    return {
        "model.path": embedded_task.model,
        "data.train_files": write_pairs(folder / "train.jsonl", 2048, seed=1),
        "data.val_files": write_pairs(folder / "val.jsonl", 256, seed=2),
        "data.max_length": 32,
        "optim.lr": 3e-3,
        "trainer.default_local_dir": folder / "run",
        "trainer.total_training_steps": 4,
        "trainer.val_before_train": "false",
        "trainer.device": "cpu",
    }


def reward_model(arguments: dict[str, Any], folder: Path | None = None, **changes: Any) -> int:
    if folder is not None:
        changes["trainer.default_local_dir"] = folder
    return main_reward_model.main([f"{key}={value}" for key, value in (arguments | changes).items()])


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(("time", "timing", "perf"))} for row in rows]


@pytest.fixture(scope="module")
def trained(arguments: dict[str, Any]) -> Path:
    """The folder of a run that has learned the task."""
    assert reward_model(arguments, **{"trainer.total_training_steps": 160, "trainer.val_before_train": "true"}) == 0
    return Path(arguments["trainer.default_local_dir"])


def test_it_starts_at_ln_2_and_learns_the_held_out_pairs(trained: Path) -> None:
    before, *steps = metrics(trained)
    assert steps[0]["train/loss"] == pytest.approx(math.log(2), abs=0.05)
    assert before["val/loss"] == pytest.approx(math.log(2), abs=0.05)
    last = steps[-1]
    assert last["val/accuracy"] >= 0.98
    assert last["val/accuracy_low"] < last["val/accuracy"] <= last["val/accuracy_high"] <= 1
    assert last["val/margin"] == pytest.approx(last["val/chosen_score"] - last["val/rejected_score"], abs=1e-5)
    assert last["val/margin"] > 3
    assert last["val/length_accuracy"] == 0.5  # all pairs are ties in length
    assert 0 <= last["val/calibration_error"] < 0.1
    assert abs(last["val/chosen_score"] + last["val/rejected_score"]) < 4  # centred
    assert not [name for name in last if "bin" in name]
