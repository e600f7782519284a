"""Supervised updates equal plain PyTorch's, however rows are cut and on one rank or two."""

from pathlib import Path

import pytest
from helpers.engine_properties import TIED, Layout
from helpers.sft import assert_sft_equals_plain_pytorch
from helpers.tiny import save_tiny_model

from lockstep.models.packing import Budget


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_updates_equal_plain_pytorch(tmp_path: Path, strategy: str, world: int) -> None:
    assert_sft_equals_plain_pytorch(Layout(strategy, world), save_tiny_model(tmp_path, "qwen2", **TIED))


@pytest.mark.parametrize("budget", [Budget(10_000, 1), Budget(10_000), Budget(14)], ids=str)
def test_the_cut_changes_nothing(tmp_path: Path, budget: Budget) -> None:
    assert_sft_equals_plain_pytorch(Layout("fsdp2", 1), save_tiny_model(tmp_path), budget)


def test_a_model_whose_logits_are_not_its_layers_alone(tmp_path: Path) -> None:
    """Cohere scales its logits: it makes them itself."""
    assert_sft_equals_plain_pytorch(Layout("fsdp2", 1), save_tiny_model(tmp_path, "cohere"))
