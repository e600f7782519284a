"""Files of preferences for the tiny model, and runs of `lockstep dpo` on them in this process."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from helpers.tiny import save_tiny_model
from lockstep.config.dpo import DPOConfig
from lockstep.config.load import load_recipe
from lockstep.config.stage import STAGE_KEYS
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.trainer.dpo import DPOTrainer
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.engine_workers import ActorRolloutRefWorker
from lockstep.workers.response_losses import make_preference_loss


def make_preferences(folder: Path, pairs: int = 16) -> None:
    """model, train.jsonl and val.jsonl (pairs: a word backwards, or some other word), labels.jsonl (the same with one answer a row)."""
    save_tiny_model(folder / "model")
    draw = random.Random(0)

    def word() -> str:
        return "".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(3, 6)))

    rows = [{"prompt": prompt, "chosen": prompt[::-1], "rejected": f"{word()}q"} for prompt in (word() for _ in range(2 * pairs))]
    labels = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in rows[:pairs]
        for name in ("chosen", "rejected")
    ]
    for name, part in (("train", rows[:pairs]), ("val", rows[pairs:]), ("labels", labels)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def dpo_config(folder: Path, *overrides: str) -> DPOConfig:
    """A run of three steps in a folder that `make_preferences` filled."""
    return load_recipe(
        DPOConfig,
        [
            f"model.path={folder / 'model'}",
            f"data.train_files={folder / 'train.jsonl'}",
            "data.max_length=32",
            "data.train_batch_size=6",
            "engine.max_token_len_per_gpu=64",
            "optim.lr=1e-3",
            f"trainer.default_local_dir={folder / 'run'}",
            "trainer.device=cpu",
            "trainer.total_training_steps=3",
            "trainer.save_freq=0",
            *overrides,
        ],
    )


def make_trainer(config: DPOConfig, group_cls: Any = LocalWorkerGroup) -> DPOTrainer:
    """The trainer, without workers."""
    loss = config.loss
    make_loss = partial(make_preference_loss, STAGE_KEYS.name, loss.loss_mode, loss.parameters, loss.nll_coef)
    return DPOTrainer(config, hf_tokenizer(str(config.model.path)), ActorRolloutRefWorker, group_cls, make_loss)


def train(config: DPOConfig, group_cls: Any = LocalWorkerGroup) -> Sequence[dict[str, float]]:
    """The metrics of each step, as logged."""
    trainer = make_trainer(config, group_cls)
    try:
        trainer.init_workers()
        result = trainer.fit()
    finally:
        trainer.close()
    return list(_read(result.metrics_file))


def _read(path: Path) -> Iterator[dict[str, float]]:
    return (json.loads(line) for line in path.read_text().splitlines())
