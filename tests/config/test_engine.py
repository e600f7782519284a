"""An adapter to start from: what cannot be trained is refused when the configuration is read."""

import json

import pytest
from helpers.errors import raises

from lockstep.config import load_config
from lockstep.config.dpo import DPOConfig
from lockstep.config.engine import ModelConfig, read_adapter
from lockstep.config.load import load_recipe
from lockstep.errors import ConfigError

PLAIN = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", "init_lora_weights": True,
    "lora_dropout": 0.05, "rank_pattern": {}, "megatron_core": "megatron.core", "modules_to_save": ["classifier", "score"],
}  # fmt: skip


def adapter(folder, **changes):
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | changes))
    (folder / "adapter_model.safetensors").touch()
    return str(folder)


def test_the_folder_decides_and_the_model_adapts(tmp_path):
    path = adapter(tmp_path, use_rslora=True)
    assert read_adapter(path, "key") == {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj"]}
    for same in ({}, {"lora_rank": 4}, {"lora_alpha": 8, "target_modules": ["q_proj"]}):
        model = ModelConfig(path="model", lora_adapter_path=path, **same)
        model.check("model")
        assert model.adapts


@pytest.mark.parametrize(
    "option",
    [
        {"peft_type": "LOHA"}, {"peft_type": None}, {"use_dora": True}, {"bias": "all"}, {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}}, {"modules_to_save": ["embed_tokens"]}, {"init_lora_weights": "pissa"}, {"lora_bias": True},
        {"an_option_of_tomorrow": {"a": 1}}, {"r": 0}, {"target_modules": None},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_are_not_plain_lora_are_refused(tmp_path, option):
    (name,) = option
    with raises(ConfigError, "key") as error:
        read_adapter(adapter(tmp_path, **option), "key")
    assert name in str(error.value)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_an_adapter_is_refused(tmp_path, name):
    path = adapter(tmp_path)
    (tmp_path / name).unlink()
    with raises(ConfigError, "key") as error:
        read_adapter(path, "key")
    assert name in str(error.value)


def test_keys_that_contradict_the_folder_are_refused_with_their_names(tmp_path):
    key = "actor_rollout_ref.model"
    for setting in ("lora_rank=8", "lora_alpha=32", "target_modules=[v_proj]"):
        with raises(ConfigError, f"{key}.{setting.partition('=')[0]}"):
            load_config([f"{key}.lora_adapter_path={adapter(tmp_path)}", f"{key}.{setting}"])


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("actor_rollout_ref.model.lora_adapter_path", ["actor_rollout_ref.actor.strategy=megatron"]),
        ("reward_model.model.lora_adapter_path", []),
    ],
)
def test_what_cannot_learn_adapters_refuses_one(tmp_path, key, more):
    with raises(ConfigError, key):
        load_config([f"{key}={adapter(tmp_path)}", *more])


def test_the_reference_of_dpo_is_the_model_without_the_adapter(tmp_path):
    overrides = ["model.path=model", "data.train_files=pairs.jsonl", f"model.lora_adapter_path={adapter(tmp_path)}"]
    assert load_recipe(DPOConfig, overrides).reference_mode == "adapter"
    with raises(ConfigError, "reference.mode"):
        load_recipe(DPOConfig, [*overrides, "reference.mode=file"])
