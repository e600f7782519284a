"""`lockstep sft` as a user runs it, on the embedded task's model: it learns, resumes to the bit, and says what is wrong in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance import NUMBER_TOL, WEIGHT_ATOL
from helpers.stages import WORDS, metrics, run_main, write_examples
from helpers.tiny import save_tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.trainer import recipes

TRL = json.loads((Path(__file__).parent / "sft_trl.json").read_text())
"""Made by sft_trl.py beside it."""


@pytest.fixture
def arguments(embedded_task: Any, tmp_path: Path) -> dict[str, Any]:
    return {
        "model.path": embedded_task.model,
        "data.train_files": write_examples(tmp_path, WORDS * 4),
        "data.max_length": 32,
        "data.train_batch_size": 12,
        "optim.lr": 3e-3,
        "trainer.default_local_dir": tmp_path / "run",
        "trainer.total_training_steps": 4,
    }


def sft(arguments: dict[str, Any], **changes: Any) -> int:
    return run_main(recipes.SFT.main, arguments | changes)


def test_a_batch_that_was_not_set_is_as_large_as_a_small_file(arguments: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    del arguments["data.train_batch_size"]
    few = {"data.train_files": write_examples(tmp_path, WORDS[:5]), "trainer.total_training_steps": 1}
    assert sft(arguments, **few) == 0
    assert "data.train_batch_size=5 (the data has 5 rows" in capsys.readouterr().out
    assert sft(arguments, **few, **{"data.train_batch_size": 6, "trainer.resume_mode": "disable"}) == 1


def test_it_learns_and_its_folder_is_a_model(arguments: dict[str, Any], embedded_task: Any, tmp_path: Path, capsys: Any) -> None:
    more = {"data.val_files": write_examples(tmp_path, ["bed", "jag", "ahi"], "val.jsonl"), "sampled.files": embedded_task.val_file}
    more |= {"sampled.max_samples": 8, "sampled.max_prompt_length": 16, "sampled.max_response_length": 12, "trainer.test_freq": 4}
    assert sft(arguments, **more, **{"trainer.total_training_steps": 30}) == 0
    rows = metrics(tmp_path / "run")
    steps, last = [row for row in rows if "train/nll" in row], rows[-1]
    assert steps[-1]["train/nll"] < 0.5 * steps[0]["train/nll"]
    assert steps[-1]["train/token_accuracy"] > steps[0]["train/token_accuracy"]
    assert 0 < steps[0]["train/trained_share"] < 1
    assert {"val/nll", "val/token_accuracy", "val/bits_per_byte", "val-core/lockstep/reverse/reward/mean@1"} <= set(last)
    assert (tmp_path / "run" / "validation" / "4.jsonl").is_file()
    folder = tmp_path / "run" / "global_step_30" / "actor"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("<user>bed<assistant>deb<eos>")["input_ids"]])
    nll = torch.nn.functional.cross_entropy(model(ids).logits[0, 4:-1], ids[0, 5:])
    assert nll.item() < 2.0
    out = capsys.readouterr().out
    assert "nll" in out.split("step 1/30", 1)[1].splitlines()[0]
    assert "val/nll" in out.rsplit("done: 30 steps", 1)[1]


def test_a_model_that_does_not_change_is_the_same_before_and_after(
    arguments: dict[str, Any], embedded_task: Any, tmp_path: Path
) -> None:
    """Although all rows are validated after the step, and a part of them before."""
    more = {
        "data.val_files": write_examples(tmp_path, ["bed", "jag", "ahi"] * 2, "val.jsonl"),
        "sampled.files": embedded_task.val_file,
    }
    more |= {"sampled.max_samples": 8, "sampled.max_prompt_length": 16, "sampled.max_response_length": 12, "optim.lr": 0.0}
    assert sft(arguments, **more, **{"trainer.total_training_steps": 1, "trainer.val_before_train_samples": 2}) == 0
    before, after = metrics(tmp_path / "run")
    assert before["val-aux/share_of_rows"] == 0.25
    names = ["val/nll", "val/token_accuracy", "val-core/lockstep/reverse/reward/mean@1"]
    assert [after[f"val-first/{name}"] for name in names] == [before[name] for name in names]
    assert after["val/nll"] != before["val/nll"]


def test_bits_per_byte_is_the_loss_in_bits_over_the_text(arguments: dict[str, Any], tmp_path: Path) -> None:
    assert sft(arguments, **{"trainer.total_training_steps": 1, "data.shuffle": "false"}) == 0
    (step,) = metrics(tmp_path / "run")
    tokens, num_bytes = sum(len(w) + 1 for w in WORDS), sum(map(len, WORDS))  # the end token is trained and is no text
    assert step["train/bits_per_byte"] == pytest.approx(step["train/nll"] * tokens / num_bytes / 0.6931471805599453, rel=1e-9)
    assert step["train/trained_share"] == pytest.approx(tokens / sum(2 * len(w) + 3 for w in WORDS))


@pytest.mark.parametrize("form", TRL["cases"])
def test_losses_gradients_and_weights_are_trls(tmp_path: Path, form: str) -> None:
    """From the file to the saved weights, within the engines' tolerances. TRL has micro-batches of two rows, ours have three.

    A prompt and a completion that are strings are plain text to TRL; to us only where the tokenizer has no chat template.
    """
    case, every = TRL["cases"][form], TRL["every"]
    model, file = save_tiny_model(tmp_path / "model"), tmp_path / "train.jsonl"
    if form == "completion":
        (tmp_path / "model" / "chat_template.jinja").unlink()
    file.write_text("".join(json.dumps(row) + "\n" for row in case["rows"]))
    arguments = {
        "model.path": model, "data.train_files": file, "data.max_length": 48, "data.shuffle": "false",
        "data.train_batch_size": TRL["rows_per_step"], "engine.micro_batch_size_per_gpu": 3, "optim.lr": 1e-3,
        "optim.lr_scheduler_type": "constant", "optim.lr_warmup_steps": 0, "optim.weight_decay": 0.0, "optim.clip_grad": 0.5,
        "trainer.default_local_dir": tmp_path / "run", "trainer.total_training_steps": len(case["steps"]), "trainer.device": "cpu",
    }  # fmt: skip
    assert sft(arguments) == 0
    for ours, theirs in zip(metrics(tmp_path / "run"), case["steps"], strict=True):
        assert ours["train/nll"] == pytest.approx(theirs["loss"], rel=0, abs=NUMBER_TOL)
        assert ours["train/grad_norm"] == pytest.approx(theirs["grad_norm"], rel=NUMBER_TOL)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "run/global_step_2/actor"))
    assert after.keys() == case["weights"].keys()
    tight = 0
    for name, weights in case["weights"].items():
        allowed = WEIGHT_ATOL + torch.tensor(case["noise"][name])
        assert ((after[name].flatten()[::every] - torch.tensor(weights)).abs() <= allowed).all(), name
        tight += int(((after[name] - before[name]).flatten()[::every].abs() > 100 * allowed).sum())
    assert tight > 150  # so many weights moved by more than a hundred times what is allowed


def test_a_run_that_is_cut_in_two_ends_with_the_same_bits(arguments: dict[str, Any], tmp_path: Path) -> None:
    assert sft(arguments, **{"trainer.save_freq": 2}) == 0
    halves = arguments | {"trainer.default_local_dir": tmp_path / "halves", "trainer.save_freq": 2}
    # The schedule of the learning rate is that of the whole run, so the first half is stopped, not shortened.
    assert sft(halves) == 0
    (tmp_path / "halves" / "global_step_4").rename(tmp_path / "gone")
    assert sft(halves) == 0
    assert metrics(tmp_path / "halves") == metrics(tmp_path / "run")
    one, other = (load_file(tmp_path / run / "global_step_4" / "actor" / "model.safetensors") for run in ("run", "halves"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_processes_train_as_one(arguments: dict[str, Any], tmp_path: Path, ray_cluster: Any) -> None:
    assert sft(arguments) == 0
    assert sft(arguments, **{"trainer.n_gpus_per_node": 2, "trainer.default_local_dir": tmp_path / "two"}) == 0
    for one, two in zip(metrics(tmp_path / "run"), metrics(tmp_path / "two"), strict=True):
        assert two["train/nll"] == pytest.approx(one["train/nll"], rel=1e-5)


def test_adapters_are_trained_and_merged(arguments: dict[str, Any], embedded_task: Any, tmp_path: Path) -> None:
    assert sft(arguments, **{"model.lora_rank": 4, "trainer.total_training_steps": 10}) == 0
    rows = metrics(tmp_path / "run")
    assert rows[-1]["train/nll"] < rows[0]["train/nll"]
    folder = tmp_path / "run" / "global_step_10" / "actor"
    before, after = (load_file(Path(f) / "model.safetensors") for f in (embedded_task.model, folder))
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved
    assert all("proj" in name for name in moved)
    again = tmp_path / "again"
    assert sft(arguments, **{"model.lora_adapter_path": folder / "adapter", "trainer.default_local_dir": again}) == 0
    assert metrics(again)[0]["train/nll"] == pytest.approx(rows[-1]["train/nll"], abs=0.1)
    assert metrics(again)[-1]["train/nll"] < metrics(again)[0]["train/nll"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.path": ""}, "model.path is empty"),
        ({"data.train_files": ""}, "data.train_files is empty"),
        ({"data.train_on": "user"}, "data.train_on=user"),
        ({"data.max_length": 6}, "train.jsonl row"),
        ({"data.max_length": 4096}, "data.max_length=4096"),
        ({"data.train_batch_size": 99}, "data.train_batch_size=99"),
        ({"engine.max_token_len_per_gpu": 16}, "engine.max_token_len_per_gpu=16"),
        ({"engine.strategy": "ddp"}, "engine.strategy=ddp"),
        ({"trainer.critic_warmup": 3}, "unknown key 'trainer.critic_warmup'"),
        ({"actor_rollout_ref.model.path": "x"}, "lockstep sft --help"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_work_is_one_line_before_a_model_is_loaded(
    arguments: dict[str, Any], change: dict[str, Any], said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.workers.engine.spec.load_on_meta", lambda *_: pytest.fail("a model was loaded"))
    assert sft(arguments, **change) == 1
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
