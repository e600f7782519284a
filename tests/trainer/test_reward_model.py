"""`lockstep reward-model` as a user runs it: words written backwards are chosen, copied ones are rejected."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.run import roles, train
from helpers.stages import metrics, run_main
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.data.pairs import PairDataset
from lockstep.data.token_rows import ScoredText
from lockstep.trainer import recipes
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers import training_worker
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.training_worker import score_rows


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
    return run_main(recipes.REWARD_MODEL.main, arguments | changes)


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
    assert last["val/accuracy"] >= 0.95  # 0.977 to 0.996 for four seeds
    assert last["val/accuracy_low"] < last["val/accuracy"] <= last["val/accuracy_high"] <= 1
    assert last["val/margin"] == pytest.approx(last["val/chosen_score"] - last["val/rejected_score"], abs=1e-5)
    assert last["val/margin"] > 3
    assert last["val/length_accuracy"] == 0.5  # all pairs are ties in length
    assert 0 <= last["val/calibration_error"] < 0.1
    assert abs(last["val/chosen_score"] + last["val/rejected_score"]) < 4  # centred
    assert not [name for name in last if "bin" in name]


def test_plain_transformers_scores_the_folder_the_same(trained: Path, arguments: dict[str, Any]) -> None:
    """What a validation reported, from the folder, its tokenizer and its chat template alone, in padded blocks."""
    folder = trained / "global_step_160" / "actor"
    settings = json.loads((folder / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForSequenceClassification"]
    assert settings["pad_token_id"] == 0
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.num_labels == 1
    rows = [json.loads(line) for line in Path(arguments["data.val_files"]).read_text().splitlines()]

    def scores(answer: str) -> torch.Tensor:
        chats = [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}] for row in rows]
        texts = [text + tokenizer.eos_token for text in tokenizer.apply_chat_template(chats, tokenize=False)]
        with torch.no_grad():
            return model(**tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)).logits[:, 0]

    chosen, rejected, last = scores("chosen"), scores("rejected"), metrics(trained)[-1]
    assert last["val/chosen_score"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert last["val/rejected_score"] == pytest.approx(rejected.mean().item(), abs=1e-5)
    assert last["val/accuracy"] == (chosen > rejected).float().mean().item()


def test_the_folder_is_ppos_reward_model_as_it_is(trained: Path, embedded_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PPO's responses, each with the end token, get plain transformers' scores."""
    folder, seen = trained / "global_step_160" / "actor", []

    def recorded(engine: TrainEngine, rows: Any, *options: Any) -> torch.Tensor:
        scores = score_rows(engine, rows, *options)
        seen.extend(zip(rows.rows(), scores, strict=True))
        return scores

    monkeypatch.setattr(training_worker, "score_rows", recorded)
    more = ("trainer.total_training_steps=1", "trainer.val_before_train=false")
    config = embedded_config("reward_model.enable=true", f"reward_model.model.path={folder}", *more)
    (step,) = train(config, {"global_pool": [1]}, roles("ActorRolloutRef", "Critic", "RewardModel"))
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(seen) == 16
    for ids, found in seen:
        assert ids[-1] == tokenizer.eos_token_id
        assert found.item() == pytest.approx(model(ids[None]).logits.item(), abs=1e-5)
    assert step["critic/score/mean"] == pytest.approx(sum(found.item() for _, found in seen) / len(seen), abs=1e-5)


def test_rows_that_only_the_model_judges_are_validated_by_it_and_others_by_their_rule(
    trained: Path, embedded_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def recorded(engine: TrainEngine, rows: Any, *options: Any) -> torch.Tensor:
        scores = score_rows(engine, rows, *options)
        seen.extend(scores.tolist())
        return scores

    monkeypatch.setattr(training_worker, "score_rows", recorded)
    folder = trained / "global_step_160" / "actor"
    keys = ("trainer.total_training_steps=1", "trainer.val_only=true", f"trainer.validation_data_dir={tmp_path / 'said'}")
    config = embedded_config("reward_model.enable=true", f"reward_model.model.path={folder}", *keys)
    table = pq.read_table(config.data.val_files).slice(0, 8)
    sources = pa.array(["chat" if i % 2 else source for i, source in enumerate(table["data_source"].to_pylist())])
    pq.write_table(table.set_column(table.column_names.index("data_source"), "data_source", sources), tmp_path / "val.parquet")
    data = replace(config.data, val_files=str(tmp_path / "val.parquet"), val_max_samples=-1, shuffle=False)
    (row,) = train(replace(config, data=data), {"global_pool": [1]}, roles("ActorRolloutRef", "Critic", "RewardModel"))
    scores = [json.loads(line)["score"] for line in (tmp_path / "said" / "0.jsonl").read_text().splitlines()]
    assert scores[1::2] == pytest.approx(seen, abs=1e-6)
    assert set(scores[::2]) <= {0.0, 1.0}
    assert row["val-core/chat/reward/mean@1"] == pytest.approx(sum(seen) / 4, abs=1e-6)


@pytest.mark.parametrize("template", [True, False])
def test_rl_scores_the_ids_of_the_pairs(trained: Path, arguments: dict[str, Any], tmp_path: Path, template: bool) -> None:
    tokenizer = hf_tokenizer(str(trained / "global_step_160" / "actor"))
    if not template:
        tokenizer.chat_template = None
    pairs = PairDataset(arguments["data.val_files"], tokenizer, max_length=32, whole=True)
    batch, text = pairs.batch(range(8)), ScoredText(tokenizer)
    rows = [json.loads(line) for line in Path(arguments["data.val_files"]).read_text().splitlines()[:8]]
    expected = [text.ids(row["prompt"], row[answer]) for row in rows for answer in ("chosen", "rejected")]
    columns = zip(batch.ragged("prompts").rows(), batch.ragged("responses").rows(), strict=True)
    assert [[*prompt.tolist(), *response.tolist()] for prompt, response in columns] == expected
    assert all(ids[-1] == tokenizer.eos_token_id for ids in expected)


def test_two_processes_train_as_one(arguments: dict[str, Any], tmp_path: Path, ray_cluster: Any) -> None:
    assert reward_model(arguments, tmp_path / "one") == 0
    assert reward_model(arguments, tmp_path / "two", **{"trainer.n_gpus_per_node": 2}) == 0
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for name in ("train/loss", "train/margin", "train/calibration_error", "train/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-5), name
    assert metrics(tmp_path / "two")[-1]["val/loss"] == pytest.approx(metrics(tmp_path / "one")[-1]["val/loss"], abs=1e-5)


def test_adapters_and_the_head_are_trained_and_merged(arguments: dict[str, Any], tmp_path: Path) -> None:
    assert reward_model(arguments, tmp_path, **{"model.lora_rank": 4, "trainer.total_training_steps": 3}) == 0
    folder = tmp_path / "global_step_3" / "actor"
    before, after = (load_file(Path(path) / "model.safetensors") for path in (arguments["model.path"], folder))
    moved = [name for name in after if name not in before or not torch.equal(before[name], after[name])]
    assert "score.weight" in moved
    assert all("proj" in name or name == "score.weight" for name in moved)
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1
    assert "base_model.model.score.weight" in load_file(folder / "adapter" / "adapter_model.safetensors")


def test_a_margin_moves_the_loss(arguments: dict[str, Any], tmp_path: Path) -> None:
    files = write_pairs(tmp_path / "margin.jsonl", 64, seed=1, margin=2.0)
    assert reward_model(arguments, tmp_path / "run", **{"data.train_files": files, "trainer.total_training_steps": 1}) == 0
    assert metrics(tmp_path / "run")[0]["train/loss"] == pytest.approx(math.log(1 + math.exp(2)), abs=0.1)


def test_validation_has_the_accuracy_on_each_source(trained: Path, arguments: dict[str, Any], tmp_path: Path) -> None:
    files = [
        write_pairs(tmp_path / f"{name}.jsonl", count, seed=3, data_source=name) for name, count in (("easy", 40), ("hard", 9))
    ]
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    files[1].write_text("".join(json.dumps(row) + "\n" for row in turned))
    changes = {"data.val_files": f"[{files[0]},{files[1]}]", "data.train_batch_size": 16, "trainer.total_training_steps": 1}
    changes |= {"model.path": trained / "global_step_160" / "actor", "optim.lr": 0.0}
    assert reward_model(arguments, tmp_path / "run", **changes) == 0
    last = metrics(tmp_path / "run")[-1]
    assert last["val/accuracy/easy"] > 0.9 > 0.1 > last["val/accuracy/hard"]
    assert last["val/accuracy"] == pytest.approx((40 * last["val/accuracy/easy"] + 9 * last["val/accuracy/hard"]) / 49)
    assert last["val/accuracy_low/hard"] < last["val/accuracy_high/hard"]
    assert reward_model(arguments, tmp_path / "both", **changes, **{"trainer.val_before_train": "true"}) == 0
    before, after = metrics(tmp_path / "both")
    assert before["val-aux/share_of_rows"] == 16 / 49
    found = {name: value for name, value in before.items() if name.startswith("val/")}
    assert {name.removeprefix("val-first/"): value for name, value in after.items() if name.startswith("val-first/")} == found


BAD_ROW = {"prompt": "abc", "chosen": "cba"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.path": ""}, "model.path is empty"),
        ({"data.train_files": ""}, "data.train_files is empty"),
        ({"data.truncation": "right"}, "where its score is read"),
        ({"data.max_length": 6}, "train.jsonl row"),
        ({"engine.max_token_len_per_gpu": 40}, "2 * data.max_length=64"),
        ({"engine.micro_batch_size_per_gpu": 1}, "the two rows of a pair"),
        ({"loss.center_rewards_coefficient": -1}, "loss.center_rewards_coefficient"),
        ({"data.train_on": "all"}, "lockstep reward-model --help"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_work_is_one_line_before_a_model_is_loaded(
    arguments: dict[str, Any], change: dict[str, Any], said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.workers.engine.spec.load_on_meta", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr("lockstep.workers.engine.spec.load_model", lambda *_: pytest.fail("a model was loaded"))
    assert reward_model(arguments, **change) == 1
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_a_bad_row_is_named_with_its_file_and_number(arguments: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    files = write_pairs(tmp_path / "some.jsonl", 64, seed=1)
    files.write_text(files.read_text() + json.dumps(BAD_ROW) + "\n")
    assert reward_model(arguments, tmp_path / "run", **{"data.train_files": files}) == 1
    assert "some.jsonl row 64: chosen and rejected must both be strings or both messages" in capsys.readouterr().err


def test_padding_is_never_the_end_of_a_row(embedded_task: Any, arguments: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    """Where the end token pads, another token becomes the padding of the model and of its folder; a row that ends with it is refused."""
    tokenizer = hf_tokenizer(str(embedded_task.model))
    tokenizer.pad_token = tokenizer.eos_token
    shutil.copytree(embedded_task.model, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert reward_model(arguments, tmp_path / "run", **{"model.path": tmp_path / "model", "trainer.total_training_steps": 1}) == 0
    folder = tmp_path / "run" / "global_step_1" / "actor"
    saved, model = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    assert saved.pad_token_id == model.config.pad_token_id != saved.eos_token_id
    tokenizer.chat_template = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    tokenizer.chat_template += "{{ '<assistant>' if add_generation_prompt else '<user>' }}"
    tokenizer.pad_token = "<user>"
    tokenizer.save_pretrained(tmp_path / "model")
    assert reward_model(arguments, tmp_path / "other", **{"model.path": tmp_path / "model"}) == 1
    assert "ends with the padding token '<user>', where the score is read" in capsys.readouterr().err
