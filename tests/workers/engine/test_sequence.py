"""Sequence parallelism in fsdp and fsdp2: the properties of helpers/engine_properties.py at their tolerances, and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import engine_properties as properties
from helpers.conformance import STEPS, batch_of
from helpers.engine_properties import LM, TIED, VALUE, Layout
from helpers.engines import engine_choice
from helpers.tiny import save_tiny_model, tiny_config

from lockstep.errors import ConfigError
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.workers.engine import spec
from lockstep.workers.engine.registry import check_engine
from lockstep.workers.engine.sequence import check_sequence_ranks


def sp(size: int, world: int | None = None, strategy: str = "fsdp2", **section: Any) -> Layout:
    return Layout(strategy, world or size, {"ulysses_sequence_parallel_size": size, **section})


CASES = {
    "fsdp2 sp2 llama": (sp(2), "llama", LM, "full", {}),
    "fsdp2 sp2 qwen2 value": (sp(2), "qwen2", VALUE, None, {}),
    "fsdp sp2 qwen2 tied": (sp(2, strategy="fsdp"), "qwen2", LM, "selective", TIED),
    "fsdp2 dp2 sp2 qwen3": (sp(2, 4), "qwen3", LM, None, {}),
    "fsdp2 dp2 sp2, two copies": (sp(2, 4, fsdp_size=2), "llama", LM, None, {}),
    "fsdp2 sp4, two keys repeated": (sp(4), "llama", LM, None, TIED),
    "fsdp dp2 sp2 llama value": (sp(2, 4, "fsdp"), "llama", VALUE, "full", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_updates_equal_plain_pytorch(tmp_path: Path, case: str) -> None:
    layout, model_type, head, recompute, changes = CASES[case]
    path = save_tiny_model(tmp_path, model_type, value_head=head is VALUE, **changes)
    properties.assert_updates_equal_plain_pytorch(layout, path, head, recompute=recompute)


@pytest.mark.parametrize("head", [LM, VALUE])
def test_rows_that_share_their_prompt_update_like_rows_alone(tmp_path: Path, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path, value_head=head is VALUE)
    properties.assert_shared_prompts_change_nothing(sp(2), path, head, monkeypatch)


def test_bf16_computes_near_fp32(tmp_path: Path) -> None:
    properties.assert_bf16_is_near_fp32(sp(2), save_tiny_model(tmp_path))


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_scores_equal_sequence_classification_one_row_at_a_time(tmp_path: Path, strategy: str) -> None:
    path = save_tiny_model(tmp_path, "qwen2", score_head=True)
    properties.assert_scores_equal_one_row_at_a_time(sp(2, strategy=strategy), path, Budget(10))


def test_the_budget_is_that_of_one_rank(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path)
    longest = max(len(row["prompts"]) + len(row["responses"]) for row in STEPS[0])
    properties.assert_updates_equal_plain_pytorch(sp(2), path, steps=STEPS[:1], budget=Budget((longest + 1) // 2))

    def refuse() -> None:
        with pytest.raises(ConfigError, match=f"more than a micro-batch may hold \\({longest - longest % 2 - 2}\\)"):
            sp(2).engine(path).forward(batch_of(STEPS[0]), Budget(longest // 2 - 1))

    sp(2).run(refuse)


def test_generation_is_each_rank_alone(tmp_path: Path) -> None:
    properties.assert_a_rank_generates_alone(sp(2), save_tiny_model(tmp_path))


def test_a_layout_that_cannot_be_is_refused_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(ConfigError, match=r"a\.b=4 must divide the 6 ranks"):
        check_sequence_ranks(4, config, 6, "a.b")
    with pytest.raises(ConfigError, match=r"a\.b=4 must divide the model's 6 attention heads.*choose one of \[1, 2\]"):
        check_sequence_ranks(4, config, 4, "a.b")
    check_sequence_ranks(6, config, 12, "a.b")
    both = engine_choice(ulysses_sequence_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"ulysses_sequence_parallel_size=2 does not go with fsdp_config\.tensor_parallel_size=2"):
        check_engine(both, tiny_config(), 4, "cpu")
    path = save_tiny_model(tmp_path, num_attention_heads=1, num_key_value_heads=1)
    monkeypatch.setattr(spec, "load_on_meta", None)

    def make() -> None:
        with pytest.raises(ConfigError, match=r"fsdp_config.ulysses_sequence_parallel_size=2 must divide the model's 1 attention"):
            sp(2).engine(path)

    sp(2).run(make)
