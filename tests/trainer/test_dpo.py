"""Runs of `lockstep dpo` on a tiny model: references, losses, files, resuming."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.preferences import dpo_config, make_preferences, make_trainer, train
from helpers.tiny import save_tiny_model
from safetensors.torch import load_file

from lockstep.algorithms.preference_losses import PREFERENCE_LOSSES
from lockstep.config.dpo import DPOConfig
from lockstep.config.load import load_recipe
from lockstep.errors import ConfigError, DataError
from lockstep.protocol import DataProto, Ragged
from lockstep.trainer.dpo import DPOTrainer, mismatched
from lockstep.workers.engine_workers import ActorRolloutRefWorker

LORA = ("model.lora_rank=4", "optim.lr=1e-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    make_preferences(folder)
    return folder


def losses(steps: Any) -> list[float]:
    return [step["train/loss"] for step in steps if "train/loss" in step]


def fresh(tmp_path: Path, *overrides: str) -> list[str]:
    return [f"trainer.default_local_dir={tmp_path / 'run'}", *overrides]


@pytest.mark.parametrize("lora", [(), LORA], ids=["whole model", "lora"])
def test_every_kind_of_reference_gives_the_same_run(folder: Path, tmp_path: Path, lora: tuple[str, ...]) -> None:
    runs = {}
    for mode in ("model", "file", *(("adapter",) if lora else ())):
        kept = (f"reference.folder={tmp_path}",) if mode == "file" else ()
        overrides = fresh(tmp_path / mode, *lora, f"reference.mode={mode}", *kept)
        runs[mode] = train(dpo_config(folder, *overrides))
    start = losses(runs["model"])
    assert start[0] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(start[2] - start[0]) > 1e-3  # it learns
    for steps in runs.values():
        assert losses(steps) == pytest.approx(start, abs=1e-6)
    assert runs["model"][0]["train/margin"] == pytest.approx(0.0, abs=1e-5)


def softplus(x: float) -> float:
    """-log s(-x)."""
    return math.log1p(math.exp(x))


def log_odds(x: float) -> float:
    return x - math.log1p(-math.exp(x))


BEGINS: dict[str, Callable[[float, float], float]] = {
    **dict.fromkeys(("sigmoid", "smoothed", "robust", "sigmoid_norm"), lambda chosen, rejected: math.log(2)),
    "hinge": lambda chosen, rejected: 1.0,
    "ipo": lambda chosen, rejected: 25.0,
    "kto": lambda chosen, rejected: 0.5,
    "cpo": lambda chosen, rejected: softplus(rejected - chosen),
    "simpo": lambda chosen, rejected: softplus(rejected - chosen + 1.0),
    "orpo": lambda chosen, rejected: 0.1 * softplus(log_odds(10 * rejected) - log_odds(10 * chosen)),
}
"""Loss -> its value before the first update, of one pair with these rewards; without its nll term."""


@pytest.mark.parametrize("mode", PREFERENCE_LOSSES)
def test_every_loss_trains_and_begins_where_it_should(folder: Path, tmp_path: Path, mode: str) -> None:
    size = 6 if mode == "kto" else 1  # kto compares with another prompt's answers
    options = (f"loss.loss_mode={mode}", f"data.train_batch_size={size}", "trainer.total_training_steps=2")
    first, second = train(dpo_config(folder, *fresh(tmp_path, *options)))
    begins = BEGINS[mode](first["train/chosen_reward"], first["train/rejected_reward"])
    nll = first["train/nll"] if mode in ("cpo", "orpo") else 0.0
    assert first["train/loss"] == pytest.approx(begins + nll, rel=1e-5)
    assert first["train/grad_norm"] > 0
    assert all(math.isfinite(value) for value in second.values())


def test_a_reference_may_be_another_model(folder: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    steps = train(dpo_config(folder, *fresh(tmp_path, f"reference.path={other}", "trainer.total_training_steps=1")))
    assert abs(losses(steps)[0] - math.log(2)) > 1e-3
    other = save_tiny_model(tmp_path / "other tokens", vocab_size=40)
    with pytest.raises(ConfigError, match="reference.path must have the vocabulary of model.path"):
        make_trainer(dpo_config(folder, f"reference.path='{other}'"))


def test_answers_with_a_label_are_learned_by_kto_alone(folder: Path, tmp_path: Path) -> None:
    labels = f"data.train_files={folder / 'labels.jsonl'}"
    steps = train(dpo_config(folder, *fresh(tmp_path, labels, "loss.loss_mode=kto", "data.train_batch_size=8")))
    assert losses(steps)[0] == pytest.approx(0.5, abs=1e-6)
    assert steps[-1]["train/chosen_reward"] > steps[-1]["train/rejected_reward"]
    with pytest.raises(DataError, match=r"loss.loss_mode=sigmoid learns from pairs.*use kto"):
        make_trainer(dpo_config(folder, labels))


def test_kto_validates_on_any_number_of_rows_but_one(folder: Path, tmp_path: Path) -> None:
    """A batch of one row has no other prompt to compare with: what is left is measured with the last whole batch."""
    rows = (folder / "labels.jsonl").read_text().splitlines()[:5]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "one.jsonl").write_text(rows[0])
    keys = ["loss.loss_mode=kto", "data.train_batch_size=4", "trainer.total_training_steps=1"]
    files = [f"data.train_files={folder / 'labels.jsonl'}", f"data.val_files={tmp_path / 'rows.jsonl'}"]
    steps = train(dpo_config(folder, *fresh(tmp_path, *files, *keys)))
    assert "val/accuracy" in steps[-1]
    for more, named in (
        ("data.train_batch_size=1", "data.train_batch_size=1"),
        (f"data.val_files={tmp_path / 'one.jsonl'}", "rows of data.val_files=1"),
    ):
        with pytest.raises(ConfigError, match=f"kto compares with answers to other prompts of a batch, and {named} has none"):
            make_trainer(dpo_config(folder, *files, *keys, more))


def test_kto_says_before_a_model_is_loaded_which_batch_has_one_prompt_alone(folder: Path, tmp_path: Path) -> None:
    """Answers to a prompt often stand one after the other."""
    rows = [json.loads(row) for row in (folder / "labels.jsonl").read_text().splitlines()[:8]]
    for i, row in enumerate(rows):
        row["prompt"] = rows[i // 4 * 4]["prompt"]  # two prompts, each with four answers
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own, others = f"{tmp_path / 'rows.jsonl'}", f"{folder / 'labels.jsonl'}"
    keys = ["loss.loss_mode=kto", "data.shuffle=false", "trainer.total_training_steps=2"]

    def make(train: str, val: str, size: int, *more: str) -> None:
        files = [f"data.train_files={train}", f"data.val_files={val}", f"data.train_batch_size={size}"]
        make_trainer(dpo_config(folder, *files, *keys, *more))

    for files, named in (((own, others), "step 1"), ((others, own), "the validation batch from row 0 on")):
        with pytest.raises(
            ConfigError, match=rf"kto compares with answers to other prompts of a batch, and in {named} all answers"
        ):
            make(*files, 4)
    make(own, own, 5)
    for row, prompt in zip(rows, [rows[0]["prompt"], rows[4]["prompt"]] * 4, strict=True):
        row["prompt"] = prompt  # alone in every second row, and those are validated before the first step
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match="the validation batch from row 0 on"):
        make(others, own, 4)
    make(others, own, 4, "trainer.val_before_train=false")


@pytest.mark.parametrize("label", [True, False])
def test_a_batch_of_good_or_of_bad_answers_alone_is_learned_and_has_no_margin(folder: Path, tmp_path: Path, label: bool) -> None:
    rows = [row for row in (folder / "labels.jsonl").read_text().splitlines() if json.loads(row)["label"] is label]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    files = [f"data.{name}_files={tmp_path / 'rows.jsonl'}" for name in ("train", "val")]
    steps = train(dpo_config(folder, *fresh(tmp_path, *files, "loss.loss_mode=kto", "data.train_batch_size=4")))
    assert len(losses(steps)) > 1
    there, missing = ("chosen", "rejected") if label else ("rejected", "chosen")
    assert f"train/{there}_reward" in steps[-1]
    assert not {f"train/{missing}_reward", "train/margin"} & steps[-1].keys()


def test_validation_has_the_accuracy_with_an_interval(folder: Path, tmp_path: Path) -> None:
    overrides = fresh(
        tmp_path, f"data.val_files={folder / 'val.jsonl'}", "trainer.total_training_steps=1", "data.val_max_samples=10"
    )
    first, *_, last = train(dpo_config(folder, *overrides))
    assert first["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["val/accuracy_low"] < last["val/accuracy"] < last["val/accuracy_high"]
    assert last["val/margin"] == pytest.approx(last["val/chosen_reward"] - last["val/rejected_reward"])


# -- the file ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every forward pass of the actor."""
    found: list[int] = []
    compute = ActorRolloutRefWorker.compute_log_prob

    def counted(self: Any, data: DataProto) -> DataProto:
        found.append(len(data))
        return compute(self, data)

    counted.__dict__.update(compute.__dict__)
    monkeypatch.setattr(ActorRolloutRefWorker, "compute_log_prob", counted)
    return found


def test_the_file_is_made_once_and_is_of_this_model_and_data(folder: Path, tmp_path: Path, passes: list[int]) -> None:
    keep = ("reference.mode=file", f"reference.folder={tmp_path / 'kept'}", "trainer.total_training_steps=1")
    config = dpo_config(folder, *fresh(tmp_path / "a", *keep))
    first = losses(train(config))
    assert sum(passes) == 32
    (file,) = (tmp_path / "kept").iterdir()
    assert file.name.startswith("train.jsonl.reference-")
    assert losses(train(dpo_config(folder, *fresh(tmp_path / "b", *keep)))) == first
    assert sum(passes) == 32
    other = save_tiny_model(tmp_path / "model", seed=3)
    for number, change in enumerate((f"model.path={other}", "data.max_length=31", "data.train_max_samples=12")):
        train(dpo_config(folder, *fresh(tmp_path / str(number), *keep, change)))
    assert len(list((tmp_path / "kept").iterdir())) == 4

    with np.load(file) as found:
        log_probs, lengths = found["log_probs"], found["lengths"] + 1
    np.savez(file, log_probs=log_probs, lengths=lengths)
    with pytest.raises(DataError, match="was made of other rows"):
        train(dpo_config(folder, *fresh(tmp_path / "c", *keep)))
    file.write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read .*delete it"):
        train(dpo_config(folder, *fresh(tmp_path / "d", *keep)))


def test_a_place_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*reference.folder"):
        train(dpo_config(folder, *fresh(tmp_path, "reference.mode=file", f"reference.folder={tmp_path / 'taken'}")))


# -- resuming ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["model", "file"])
def test_an_interrupted_run_goes_on_to_the_same_bits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    kept = (f"reference.folder={tmp_path}",) if mode == "file" else ()
    keep = (f"reference.mode={mode}", *kept, "trainer.save_freq=1")
    whole, cut = (dpo_config(folder, *fresh(tmp_path / name, *keep)) for name in ("whole", "cut"))
    expected = train(whole)
    step = DPOTrainer._step

    def interrupted(self: DPOTrainer) -> dict[str, float]:
        metrics = step(self)
        if self.global_steps == 2:
            raise RuntimeError("the power is gone")
        return metrics

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the power is gone"):
        patch.setattr(DPOTrainer, "_step", interrupted)
        train(cut)
    resumed = train(cut)
    assert losses(resumed)[-1:] == losses(expected)[-1:]
    weights = [load_file(c.trainer.run_dir / "global_step_3/actor/model.safetensors") for c in (whole, cut)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.ray
def test_two_processes_have_the_losses_of_one(folder: Path, tmp_path: Path, ray_cluster: None) -> None:
    from lockstep.single_controller.ray import RayWorkerGroup

    val = f"data.val_files={folder / 'val.jsonl'}"
    alone = train(dpo_config(folder, *fresh(tmp_path / "one", val)))
    two = fresh(tmp_path / "two", val, "trainer.n_gpus_per_node=2", "trainer.worker_group=ray")
    together = train(dpo_config(folder, *two), RayWorkerGroup)
    assert losses(together) == pytest.approx(losses(alone), abs=1e-5)
    assert together[-1]["val/loss"] == pytest.approx(alone[-1]["val/loss"], abs=1e-5)


# -- what is said before anything is loaded -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.loss_mode=sigmod"], "did you mean 'sigmoid'"),
        (["loss.loss_kwargs={label_smoothing: 0.1}"], r"loss.loss_kwargs.label_smoothing is not an argument of the loss sigmoid"),
        (["loss.loss_mode=kto", "reference.mode=file"], r"whose log-probs no file has; set reference.mode=model"),
        (["engine.micro_batch_size_per_gpu=1"], "the two rows of a pair are computed together; set 2"),
        (["engine.max_token_len_per_gpu=63"], r"2 \* data.max_length=64 tokens; raise engine.max_token_len_per_gpu to at least 64"),
        (["reference.mode=adapter"], "there are none; set model.lora_rank"),
        (["reference.mode=file", "reference.path=x"], "reference.path is set, but with reference.mode=file"),
        (["loss.loss_mode=simpo", "reference.path=x"], "reference.path is set, but loss.loss_mode=simpo has no reference"),
        (["loss.beta=0"], "loss.beta=0.0 must be above 0"),
        (
            ["loss.loss_mode=robust", "loss.loss_kwargs={label_smoothing: 0.5}"],
            "needs a label_smoothing of at least 0 and below 0.5",
        ),
        (["data.train_files="], "data.train_files is empty"),
    ],
)
def test_what_cannot_work_is_refused(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(dpo_config(folder, *overrides))


def test_a_loss_of_ones_own_is_trained_on_or_refused_before_a_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def good(*, log_prob, margin, slope):\n    return slope * (log_prob[:, 1] - log_prob[:, 0] + margin[:, 0]), log_prob\n\n\n"
        "def mean(*, log_prob):\n    return log_prob.mean(), log_prob\n\n\n"
        "def broken(*, log_prob):\n    return log_prob['chosen'], log_prob\n"
    )
    own = (f"loss.loss_mode={file}:good", "trainer.total_training_steps=1")
    steps = train(dpo_config(folder, *fresh(tmp_path, *own, "loss.loss_kwargs={slope: 2.0}")))
    gap = steps[0]["train/rejected_log_prob"] - steps[0]["train/chosen_log_prob"]
    assert losses(steps) == [pytest.approx(2 * gap, rel=1e-6)]
    for name, message in (
        ("good", "needs slope"),
        ("mean", r"they are \(\) and \(1, 2\)"),
        ("broken", "fails on a pair: IndexError"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_trainer(dpo_config(folder, f"loss.loss_mode={file}:{name}"))


def test_the_example_is_a_configuration() -> None:
    example = Path(__file__).parents[2] / "examples/dpo/hh_rlhf.yaml"
    assert load_recipe(DPOConfig, ["model.path=m"], example).loss.nll_coef == 0.2


def test_a_model_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="model.path is empty"):
        load_recipe(DPOConfig, ["data.train_files=x.jsonl"])


# -- kto's mismatched pairs ----------------------------------------------------------------------------------------------------


def test_a_mismatched_row_has_the_answer_to_another_prompt() -> None:
    prompts = Ragged.from_rows([[1, 1], [1, 1], [2], [3, 3, 3]])
    responses = Ragged.from_rows([[10], [11, 11], [12, 12, 12], [13]])
    batch = DataProto.from_dict(
        {"prompts": prompts, "responses": responses, "response_mask": responses.like(responses.values * 0 + 1)},
        {"index": list("abcd")},
    )
    found = mismatched(batch, max_length=4)
    assert found.ragged("prompts").equal(prompts)
    assert [row.tolist() for row in found.ragged("responses").rows()] == [[12, 12], [12, 12], [13], [10]]
    assert found.ragged("response_mask").lengths.tolist() == [2, 2, 1, 1]
    with pytest.raises(DataError, match="all 2 rows of a batch have the same prompt"):
        mismatched(batch.select_idxs([0, 1]), max_length=4)
