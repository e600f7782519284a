"""Every recipe around RL starts from an adapter that peft wrote, trains it, and leaves one that peft reads: in all three the model is the
same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import perturbed
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lockstep.trainer import recipes

peft = pytest.importorskip("peft")
WORDS = ("abc", "face", "bed", "dig", "chad", "jig")
IDS = torch.tensor([[5, 9, 7, 3, 8, 4]])
RECIPES = {"sft": "train/nll", "reward_model": "train/loss", "dpo": "train/loss", "distill": "train/kl"}
"""Recipe -> its loss."""


@pytest.fixture(scope="module")
def files(embedded_task: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, a teacher, and for a language model and a reward model an adapter of peft's with the model that it makes of the base."""
    folder = tmp_path_factory.mktemp("adapters")
    rows = {
        "answers": [{"prompt": word, "completion": word[::-1]} for word in WORDS],
        "pairs": [{"prompt": word, "chosen": word[::-1], "rejected": word} for word in WORDS],
    }
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    perturbed(embedded_task.model, folder / "teacher")
    for name, score in (("language", False), ("score", True)):
        torch.manual_seed(1)
        layers = {"target_modules": ["q_proj", "down_proj"]}
        head = {"modules_to_save": ["score"], "task_type": "SEQ_CLS"} if score else {"task_type": "CAUSAL_LM"}
        config = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **layers, **head)
        model = peft.get_peft_model(plain(embedded_task.model, score), config)
        model.save_pretrained(folder / name / "adapter")
        model.merge_and_unload().save_pretrained(folder / name / "merged")
        AutoTokenizer.from_pretrained(embedded_task.model).save_pretrained(folder / name / "merged")
    return folder


def plain(path: Any, score: bool) -> Any:
    """The model of a folder in transformers."""
    kind: Any = AutoModelForSequenceClassification if score else AutoModelForCausalLM
    return kind.from_pretrained(path, **({"num_labels": 1, "pad_token_id": 0} if score else {}))


def output(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_adapter_of_pefts_is_trained_on_and_peft_reads_what_it_became(
    files: Path, embedded_task: Any, tmp_path: Path, recipe: str
) -> None:
    """The first loss is that of the model that peft makes of both; what the run leaves gives the same outputs merged and as an adapter."""
    score = recipe == "reward_model"
    made = files / ("score" if score else "language")
    common = {
        "data.train_files": files / ("pairs.jsonl" if recipe in ("reward_model", "dpo") else "answers.jsonl"),
        "data.max_length": 32, "data.train_batch_size": 6, "optim.lr": 1e-2, "trainer.total_training_steps": 2, "trainer.device": "cpu",
    }  # fmt: skip
    common |= {"distill": {"teacher.path": files / "teacher", "distill.max_response_length": 8, "distill.on_policy_share": 0}}.get(
        recipe, {}
    )

    def first_loss(name: str, **options: Any) -> float:
        arguments = common | options | {"trainer.default_local_dir": tmp_path / name}
        program = getattr(recipes, recipe.upper())
        assert program.main([f"{key}={value}" for key, value in arguments.items()]) == 0
        return float(json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])[RECIPES[recipe]])

    whole = {"model.path": made / "merged", "trainer.total_training_steps": 1, "trainer.save_freq": 0}
    if recipe == "dpo":
        whole["reference.path"] = embedded_task.model
    adapter = {"model.path": embedded_task.model, "model.lora_adapter_path": made / "adapter"}
    assert first_loss("adapter", **adapter) == pytest.approx(first_loss("whole", **whole), abs=1e-5)

    folder = tmp_path / "adapter" / "global_step_2" / "actor"
    merged = output(plain(folder, score))
    again = peft.PeftModel.from_pretrained(plain(embedded_task.model, score), folder / "adapter")
    torch.testing.assert_close(output(again), merged, atol=1e-5, rtol=0)
    before = output(plain(made / "merged", score))
    assert (merged - before).abs().max() > 1e-3, "nothing was learned"
    saved = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (3, 5)
