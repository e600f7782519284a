"""Ranks that share every layer: the properties of helpers/engine_properties.py, and their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import engine_properties as properties
from helpers.engine_properties import LM, SCORE, TIED, VALUE, Layout
from helpers.mixtures import MIXTURES
from helpers.tiny import save_tiny_model
from torch.distributed.tensor import DTensor

from lockstep.errors import ConfigError


def tp2(world: int = 2) -> Layout:
    return Layout("fsdp2", world, {"tensor_parallel_size": 2})


CASES = {
    "llama": ("llama", LM, 2, "full", {}),
    "qwen3 tied": ("qwen3", LM, 2, "selective", TIED),
    "qwen2 value, 2 x 2": ("qwen2", VALUE, 4, None, {}),
    "phi3": ("phi3", LM, 2, None, {}),
    "glm4": ("glm4", LM, 2, None, {}),
    "mixtral": ("mixtral", LM, 2, "full", MIXTURES["mixtral"]),
    "qwen2_moe": ("qwen2_moe", LM, 2, None, MIXTURES["qwen2_moe"]),
    "qwen3_moe, a layer without experts, 2 x 2": (
        "qwen3_moe",
        LM,
        4,
        "full",
        MIXTURES["qwen3_moe"] | TIED | {"mlp_only_layers": [0]},
    ),
    "olmoe": ("olmoe", LM, 2, None, MIXTURES["olmoe"]),
}


@pytest.mark.parametrize("case", CASES)
def test_two_updates_equal_plain_pytorch(tmp_path: Path, case: str) -> None:
    model_type, head, world, recompute, changes = CASES[case]
    path = save_tiny_model(tmp_path, model_type, value_head=head is VALUE, **changes)
    properties.assert_updates_equal_plain_pytorch(tp2(world), path, head, recompute=recompute)


def test_a_checkpoint_of_a_tensor_group_continues_on_shards_and_on_one_rank_and_back(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", **TIED)
    route = [tp2(), Layout("fsdp2", 2), Layout("fsdp2", 1), tp2()]
    properties.assert_a_checkpoint_continues(route, tmp_path, path)


def test_a_rank_holds_its_part_of_every_layer_and_scores_as_one_does(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, score_head=True)
    properties.assert_scores_equal_one_row_at_a_time(tp2(), path)

    def share() -> float:
        engine = tp2().engine(path, SCORE, optim=None, pad_token_id=0)
        assert not any(parameter.requires_grad for parameter in engine.module.parameters())
        parameters = [p for p in engine.module.parameters() if isinstance(p, DTensor)]
        return sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)

    assert all(held < 0.52 for held in tp2().run(share))  # all but the norms and the head


def test_a_rank_holds_its_experts_and_a_checkpoint_has_all_of_them(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "qwen2_moe", **MIXTURES["qwen2_moe"])

    def held() -> list[tuple[int, int]]:
        engine = tp2().engine(path, optim=None)
        experts = [p for name, p in engine.module.named_parameters() if ".experts." in name and isinstance(p, DTensor)]
        return [(len(p.to_local()), len(p)) for p in experts]

    assert tp2().run(held) == [[(2, 4)] * 4] * 2
    properties.assert_a_checkpoint_continues([tp2(), Layout("fsdp2", 1), tp2(), Layout("fsdp2", 2)], tmp_path, path)


def test_divided_experts_in_bf16_compute_near_fp32(tmp_path: Path) -> None:
    properties.assert_bf16_is_near_fp32(tp2(), save_tiny_model(tmp_path, "qwen3_moe", **MIXTURES["qwen3_moe"]))


def test_experts_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "mixtral", num_local_experts=3, num_experts_per_tok=2)

    def make() -> None:
        with pytest.raises(ConfigError, match=r"fsdp_config.tensor_parallel_size=2 cannot split the model's 3 experts evenly"):
            tp2().engine(path)

    tp2().run(make)


def test_heads_that_cannot_be_divided_are_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, num_key_value_heads=1)
    monkeypatch.setattr("lockstep.workers.engine.spec.load_on_meta", None)

    def make() -> None:
        with pytest.raises(ConfigError, match=r"fsdp_config.tensor_parallel_size=2 cannot split the model's 1 key-value heads"):
            tp2().engine(path)

    tp2().run(make)
