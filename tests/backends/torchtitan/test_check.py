"""What the torchtitan engine refuses before a model is loaded, with the key and the way out."""

from __future__ import annotations

from importlib import util
from typing import Any

import pytest
from helpers.engines import engine_choice
from helpers.tiny import tiny_config

from lockstep.backends.torchtitan import check as check_module
from lockstep.errors import ConfigError
from lockstep.workers.engine.registry import check_engine


def check_titan(keys: dict[str, Any], hf_config: Any, world: int) -> None:
    check_engine(engine_choice("torchtitan", **keys), hf_config, world, "cpu", "critic")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules are the same whether the package is there or not."""
    monkeypatch.setattr(check_module, "find_spec", lambda name: object())


@pytest.mark.parametrize(("tensor", "pipeline", "world"), [(1, 1, 1), (1, 1, 3), (2, 1, 2), (1, 2, 4), (2, 2, 8)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_layouts_that_work_are_let_through(family: str, tensor: int, pipeline: int, world: int) -> None:
    check_titan({"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}, tiny_config(family), world)


REFUSED: list[tuple[dict[str, Any], Any, int, str]] = [
    ({"tensor_parallel_size": 2}, tiny_config(), 3, r"critic.torchtitan.tensor_parallel_size=2 x .*=1 = 2 must divide the 3 ranks"),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, tiny_config(), 2, "= 4 must divide the 2 ranks"),
    ({"tensor_parallel_size": 4}, tiny_config(), 4, "tensor_parallel_size=4 must divide num_key_value_heads=2"),
    ({"tensor_parallel_size": 3}, tiny_config(), 3, "tensor_parallel_size=3 must divide num_attention_heads=4"),
    ({"tensor_parallel_size": 2}, tiny_config(intermediate_size=47), 2, "tensor_parallel_size=2 must divide intermediate_size=47"),
    ({"tensor_parallel_size": 2}, tiny_config(vocab_size=1), 2, "without a part of the vocabulary of 1 tokens"),
    ({"pipeline_parallel_size": 3}, tiny_config(), 3, "pipeline_parallel_size=3 is more than the model's 2 layers"),
    ({}, tiny_config("gpt2"), 1, "llama, qwen2, qwen3; this model is a gpt2: choose strategy fsdp2"),
    ({}, tiny_config(hidden_act="gelu"), 1, "hidden_act=gelu"),
    ({}, tiny_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), 1, "rope_type=dynamic"),
    (
        {"tensor_parallel_size": 2, "use_torch_compile": True},
        tiny_config(),
        2,
        "use_torch_compile=true: .*tensor_parallel_size=2 to 1",
    ),
]


@pytest.mark.parametrize(("section", "hf_config", "world", "words"), REFUSED)
def test_what_cannot_be_is_refused_with_its_key(section: dict[str, Any], hf_config: Any, world: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_titan(section, hf_config, world)


def test_without_the_package_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "find_spec", lambda name: None if name == "torchtitan" else util.find_spec(name))
    with pytest.raises(
        ConfigError, match=r"critic.torchtitan needs the package torchtitan.*pip install 'lockstep-rl\[torchtitan\]'"
    ):
        check_titan({}, tiny_config(), 1)
