"""Layouts and models that the megatron engine refuses before anything is loaded."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from helpers.engines import engine_choice
from helpers.tiny import tiny_config

from lockstep.errors import ConfigError
from lockstep.workers.engine.registry import check_engine

KEY = "actor_rollout_ref.actor"


def check_megatron(keys: dict[str, Any], hf_config: Any, world: int) -> None:
    check_engine(engine_choice("megatron", **keys), hf_config, world, "cuda", KEY)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.backends.megatron.check.find_spec", lambda package: object())


@pytest.mark.parametrize(("tp", "pp", "world"), [(1, 1, 1), (2, 1, 2), (2, 2, 8), (1, 2, 4)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_layouts_that_work_are_let_through(family: str, tp: int, pp: int, world: int) -> None:
    keys = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "sequence_parallel": tp > 1}
    check_megatron(keys, tiny_config(family, vocab_size=33), world)


@pytest.mark.parametrize(
    ("keys", "world", "words"),
    [
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 6, "6 ranks do not divide.*2 x .*=2 = 4 ranks"),
        ({"sequence_parallel": True}, 2, r"megatron\.sequence_parallel=true .*tensor_model_parallel_size above 1"),
        ({"tensor_model_parallel_size": 4}, 4, "=4 does not divide the model's num_key_value_heads=2; .*such as 2"),
        ({"tensor_model_parallel_size": 3}, 3, "=3 does not divide the model's num_attention_heads=4; .*such as 2"),
        ({"pipeline_model_parallel_size": 4}, 4, "=4 does not divide the model's num_hidden_layers=2; .*such as 2"),
    ],
)
def test_layouts_that_cannot_be_name_the_key_and_a_way_out(keys: dict[str, Any], world: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        check_megatron(keys, tiny_config(), world)
    assert f"{KEY}.megatron" in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gemma2", {"head_dim": 8}, "llama, qwen2, qwen3, not gemma2; use strategy fsdp2"),
        ("llama", {"attention_bias": True}, "attention_bias=true"),
        ("llama", {"hidden_act": "gelu"}, "not hidden_act=gelu"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary embeddings.*not dynamic",
        ),
    ],
)
def test_models_that_it_would_compute_wrongly_are_refused(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_megatron({}, tiny_config(family, **changes), 1)


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.backends.megatron.check.find_spec", importlib.util.find_spec)
    monkeypatch.setattr("lockstep.backends.megatron.check.PACKAGE", "no_such_package.core")
    with pytest.raises(ConfigError, match=r"pip install 'lockstep-rl\[megatron\]'"):
        check_megatron({}, tiny_config(), 1)
