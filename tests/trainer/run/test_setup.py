from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import LlamaConfig

from lockstep.config import load_config
from lockstep.config.distill import DistillConfig
from lockstep.config.load import load_recipe
from lockstep.config.ppo import PPOConfig
from lockstep.config.sft import SFTConfig
from lockstep.embedded import task
from lockstep.trainer.run.setup import fitted_to_models, with_embedded_task


def test_a_model_of_the_users_gets_the_embedded_words_and_no_other_model_is_warmed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was: half a minute, and a line on how well that other model writes words backwards."""
    monkeypatch.setattr(task, "_WarmUp", lambda *_: pytest.fail("a model was warmed up"))
    given = load_config(["actor_rollout_ref.model.path=mine", f"trainer.default_local_dir={tmp_path}"])
    config = with_embedded_task(given)
    assert config.actor_rollout_ref == given.actor_rollout_ref
    assert [pq.read_metadata(file).num_rows for file in (config.data.train_files, config.data.val_files)] == [2048, 256]
    said = capsys.readouterr().out
    assert "Making data in" in said
    assert "warm-up" not in said
    own_validation = load_config(
        ["actor_rollout_ref.model.path=mine", "data.val_files=v.parquet", f"trainer.default_local_dir={tmp_path}"]
    )
    assert with_embedded_task(own_validation).data.val_files == "v.parquet"


@pytest.mark.parametrize(
    ("root", "keys"),
    [
        (PPOConfig, ["actor_rollout_ref.model.path={model}"]),
        (PPOConfig, ["actor_rollout_ref.model.path={model}", "data.max_prompt_length=60", "algorithm.use_kl_in_reward=true"]),
        (SFTConfig, ["model.path={model}"]),
        (DistillConfig, ["model.path={model}", "teacher.path={model}"]),
        (DistillConfig, ["model.path={model}", "teacher.path={model}", "data.max_length=60"]),
    ],
)
def test_lengths_that_were_not_set_follow_what_the_model_holds(
    root: type, keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(max_position_embeddings=100).save_pretrained(tmp_path)
    given = load_recipe(root, ["data.train_files=rows.parquet", *(key.format(model=tmp_path) for key in keys)])
    config = fitted_to_models(given)
    data: Any = config.data
    longest = (
        data.max_prompt_length + data.max_response_length if root is PPOConfig else getattr(config, "longest", data.max_length)
    )
    assert longest == 100
    if any("=60" in key for key in keys):
        assert 60 in (getattr(data, "max_prompt_length", None), getattr(data, "max_length", None))
    assert "the model holds 100 tokens" in capsys.readouterr().out
    assert fitted_to_models(config) == config


def test_a_length_that_was_set_is_not_lowered(tmp_path: Path) -> None:
    LlamaConfig(max_position_embeddings=100).save_pretrained(tmp_path)
    given = load_recipe(SFTConfig, [f"model.path={tmp_path}", "data.train_files=rows.jsonl", "data.max_length=101"])
    assert fitted_to_models(given) == given
