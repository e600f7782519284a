"""trainer.on_nonfinite=skip: an update that is not finite on one rank is left out on all, counted and said."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance import STEPS, TWO_MICRO_BATCHES, batch_of, denominators_of, share, weights_of
from helpers.engine_properties import Layout
from helpers.tiny import save_tiny_model
from torch import Tensor

from lockstep.errors import NumericalError
from lockstep.trainer import recipes
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.losses import make_sft_loss
from lockstep.workers.model_worker import update_or_skip


def spoilt(*arguments: Any, rows: Any, by: float) -> Any:
    """The supervised loss with a number added that has no gradient."""
    output = make_sft_loss("train").of(denominators_of(rows))(*arguments)
    return replace(output, loss=output.loss + by)


@pytest.mark.parametrize("layout", [Layout("fsdp2", 2), Layout("fsdp", 2)], ids=["fsdp2", "fsdp"])
def test_what_is_not_finite_on_one_rank_changes_nothing_on_any(tmp_path: Path, layout: Layout) -> None:
    """The loss alone is: its gradient is that of a good update, which the other rank would take."""
    path = save_tiny_model(tmp_path)

    def updates(bad: int | None, left_out: int | None) -> tuple[list[bool], dict[str, Tensor]]:
        engine, done = layout.engine(path), []
        for number, rows in enumerate([STEPS[0], STEPS[1], STEPS[1]]):
            if number != left_out:
                loss = partial(spoilt, rows=rows, by=math.inf if number == bad and engine.rank == 1 else 0.0)
                mine = batch_of(share(rows, 0, engine.rank, engine.world_size))
                _, result = update_or_skip(engine, "train", mine, loss, TWO_MICRO_BATCHES, 1.0, False)
                done.append(result is not None)
        return done, weights_of(engine)

    for (done, weights), (_, expected) in zip(layout.run(updates, 1, None), layout.run(updates, None, 1), strict=True):
        assert done == [True, False, True]
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def run_sft(folder: Path, bad: set[int], monkeypatch: pytest.MonkeyPatch, task: Any, **changes: Any) -> int:
    """Six steps; those with the numbers `bad`, from 1, are not finite."""
    rows = [{"prompt": word, "completion": word[::-1]} for word in ("abc", "face", "bed", "dig", "chad", "jig")]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, calls = TrainEngine.forward_backward, []

    def forward_backward(self: TrainEngine, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        found = plain(self, *arguments, **options)
        if len(calls) in bad:
            raise NumericalError("the loss is nan")
        return found

    monkeypatch.setattr(TrainEngine, "forward_backward", forward_backward)
    arguments = {
        "model.path": task.model, "data.train_files": folder / "train.jsonl", "data.max_length": 32, "data.train_batch_size": 2,
        "trainer.total_training_steps": 6, "trainer.on_nonfinite": "skip", "trainer.default_local_dir": folder / "run",
    }  # fmt: skip
    return recipes.SFT.main([f"{key}={value}" for key, value in (arguments | changes).items()])


def test_a_run_counts_what_it_leaves_out_and_says_so(
    embedded_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run_sft(tmp_path, {2, 4, 5}, monkeypatch, embedded_task) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/skipped_updates"] for row in rows] == [0, 1, 0, 1, 1, 0]
    assert ["train/nll" in row for row in rows] == [True, False, True, False, False, True]
    assert "warning: step 2: 100% of the updates (train) gave numbers that are not finite" in capsys.readouterr().out


def test_three_steps_in_a_row_without_an_update_end_the_run(
    embedded_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run_sft(tmp_path, {2, 3, 4}, monkeypatch, embedded_task) == 1
    assert "no update of a model in 3 steps in a row" in capsys.readouterr().err


def test_without_it_the_first_stops_the_run(
    embedded_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run_sft(tmp_path, {2}, monkeypatch, embedded_task, **{"trainer.on_nonfinite": "stop"}) == 1
    assert "the loss is nan" in capsys.readouterr().err
