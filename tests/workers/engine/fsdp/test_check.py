"""Layouts that cannot be are refused before a model is loaded."""

from __future__ import annotations

import pytest
from helpers.engines import engine_choice
from helpers.tiny import tiny_config

from lockstep.errors import ConfigError
from lockstep.workers.engine.registry import check_engine

GOOD = [
    ("fsdp", {}, 3),
    ("fsdp", {"fsdp_size": 2}, 4),
    ("fsdp", {"fsdp_size": 1}, 2),
    ("fsdp2", {"tensor_parallel_size": 2}, 6),
    ("fsdp2", {"tensor_parallel_size": 2, "fsdp_size": 2}, 8),
]
BAD = [
    ("fsdp2", {"fsdp_size": 3}, 2, r"critic.fsdp_config.fsdp_size=3 must divide the 2 ranks"),
    ("fsdp", {"fsdp_size": 4}, 6, r"fsdp_size=4 must divide the 6 ranks"),
    ("fsdp", {"tensor_parallel_size": 2}, 2, r"tensor_parallel_size=2 needs strategy=fsdp2"),
    ("fsdp2", {"tensor_parallel_size": 2}, 3, r"must divide the 3 ranks"),
    ("fsdp2", {"tensor_parallel_size": 2, "fsdp_size": 2}, 6, r"fsdp_size=2 must divide the 3 ranks that 6 leave"),
    ("fsdp2", {"tensor_parallel_size": 4}, 4, r"2 key-value heads evenly"),
    ("fsdp2", {"tensor_parallel_size": 3}, 3, r"4 attention heads evenly"),
]


@pytest.mark.parametrize(("strategy", "keys", "world"), GOOD)
def test_a_layout_that_can_be_passes(strategy: str, keys: dict[str, int], world: int) -> None:
    check_engine(engine_choice(strategy, **keys), tiny_config(), world, "cpu", "critic")


@pytest.mark.parametrize(("strategy", "keys", "world", "words"), BAD)
def test_a_layout_that_cannot_be_is_refused_by_its_key(strategy: str, keys: dict[str, int], world: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_engine(engine_choice(strategy, **keys), tiny_config(), world, "cpu", "critic")


@pytest.mark.parametrize(
    ("family", "words"),
    [("gpt2", "transformers has no plan"), ("deepseek_v3", "divides experts of .* not of deepseek_v3")],
)
def test_a_family_that_cannot_be_split_is_refused(family: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_engine(engine_choice(tensor_parallel_size=2), tiny_config(family), 2, "cpu", "critic")


def test_a_way_to_split_that_is_not_known_is_named() -> None:
    config = tiny_config()
    config.base_model_tp_plan = {**config.base_model_tp_plan, "layers.*.mlp.up_proj": "packed_colwise"}
    with pytest.raises(ConfigError, match=r"does not know how to split llama \(its plan has packed_colwise\)"):
        check_engine(engine_choice(tensor_parallel_size=2), config, 2, "cpu", "critic")


def test_an_embedding_in_the_plan_is_split_as_it_is_anyway() -> None:
    """transformers 5.17 names a tied embedding in the plan of every config."""
    config = tiny_config(tie_word_embeddings=True)
    config.base_model_tp_plan = {**config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    check_engine(engine_choice(tensor_parallel_size=2), config, 2, "cpu", "critic")
