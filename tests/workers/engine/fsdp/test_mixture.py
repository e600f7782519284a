"""Mixtures of experts in fsdp and fsdp2 against plain transformers: updates, and the load-balance loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import engine_properties as properties
from helpers.conformance import STEPS, TWO_MICRO_BATCHES, batch_of, reference_model, share
from helpers.engine_properties import LM, Layout
from helpers.mixtures import MIXTURES
from helpers.tiny import save_tiny_model, tiny_model
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lockstep.config.engine import EngineChoice, FSDPConfig, ModelConfig, check_learner
from lockstep.errors import ConfigError
from lockstep.models.chunked_head import LossOutput
from lockstep.models.fit import check_fit
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.observability.metrics import merge_metrics, values
from lockstep.workers.engine.base import TokenOutputs, TokenRows
from lockstep.workers.engine.fsdp.make import engine_class
from lockstep.workers.engine.fsdp.mixture import MixtureEngine

CASES: dict[str, tuple[Layout, str | None]] = {
    "mixtral": (Layout("fsdp2", 1), "full"),
    "qwen2_moe": (Layout("fsdp2", 2), None),
    "qwen3_moe": (Layout("fsdp", 2), None),
    "olmoe": (Layout("fsdp2", 2, {"ulysses_sequence_parallel_size": 2}), "full"),
}
COEF = {"router_aux_loss_coef": 0.3}


@pytest.mark.parametrize("family", CASES)
def test_two_updates_equal_plain_pytorch(tmp_path: Path, family: str) -> None:
    layout, recompute = CASES[family]
    path = save_tiny_model(tmp_path, family, **MIXTURES[family])
    properties.assert_updates_equal_plain_pytorch(layout, path, recompute=recompute)


def balance_alone(path: str, rows: list[dict[str, Tensor]]) -> tuple[float, float]:
    """The mean over rows and layers of transformers' own loss at the tokens that predict responses, and its gradient's norm."""
    model = reference_model(path, LM)
    config, losses = model.config, []
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    for row in rows:
        if not len(row["responses"]):
            continue
        ids = torch.cat([row["prompts"], row["responses"]])
        found = model(input_ids=ids[None], output_router_logits=True).router_logits
        before = slice(len(row["prompts"]) - 1, len(ids) - 1)
        losses += [load_balancing_loss_func((logits[before],), experts, config.num_experts_per_tok) for logits in found]
    loss = torch.stack(losses).mean()
    (COEF["router_aux_loss_coef"] * loss).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.stack([g.norm() for g in gradients]).norm().item()


def nothing(outputs: TokenOutputs, tokens: TokenRows) -> LossOutput:
    assert outputs.log_probs is not None
    return LossOutput(0.0 * outputs.log_probs.sum(), {})


@pytest.mark.parametrize(
    ("family", "layout", "recompute"),
    [
        ("mixtral", Layout("fsdp2", 1), "full"),
        ("qwen3_moe", Layout("fsdp2", 2), "full"),
        ("olmoe", Layout("fsdp", 2), None),
        ("qwen2_moe", Layout("fsdp2", 1), None),
        ("qwen2_moe", Layout("fsdp2", 4, {"tensor_parallel_size": 2}), "full"),
    ],
)
def test_the_load_balance_loss_is_transformers_own_row_by_row(
    tmp_path: Path, family: str, layout: Layout, recompute: str | None
) -> None:
    """With a policy loss of nothing, all of the gradient is its; whatever the micro-batches."""
    path = save_tiny_model(tmp_path, family, **MIXTURES[family])
    loss, norm = balance_alone(path, STEPS[0])

    def update(budget: Budget) -> tuple[dict[str, Any], float]:
        engine = layout.engine(path, model=COEF, recompute=recompute)
        mine = batch_of(share(STEPS[0], 0, engine.rank, engine.world_size))
        return engine.forward_backward(mine, nothing, budget), engine.optim_step().grad_norm

    for budget in (TWO_MICRO_BATCHES, Budget(10_000)):
        ranks = layout.run(update, budget)
        found = values(merge_metrics([metrics for metrics, _ in ranks if metrics]))
        assert found["moe/aux_loss"] == pytest.approx(loss, rel=1e-5)
        assert all(grad_norm == pytest.approx(norm, rel=1e-4) for _, grad_norm in ranks)
        assert 1.0 <= found["moe/max_load"] <= 2.0  # two of four experts get every token at the most
        assert 0.0 <= found["moe/idle_experts"] < 1.0


def test_a_load_balance_loss_needs_a_mixture_and_whole_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^a\.router_aux_loss_coef=0.3, but LlamaForCausalLM as language_model has no router"):
        check_fit(ModelConfig(save_tiny_model(tmp_path / "llama"), **COEF), LM, "a")
    mixture = save_tiny_model(tmp_path / "mixtral", "mixtral", **MIXTURES["mixtral"])
    check_fit(ModelConfig(mixture, **COEF), LM, "a")
    with pytest.raises(
        ConfigError, match=r"^a\.router_aux_loss_coef=0.3, but MixtralForSequenceClassification as score has no router"
    ):
        check_fit(ModelConfig(mixture, **COEF), Head.SCORE, "a")
    assert engine_class(tiny_model("mixtral", **MIXTURES["mixtral"]), LM) is MixtureEngine
    divided = EngineChoice("fsdp2", fsdp_config=FSDPConfig(ulysses_sequence_parallel_size=2))
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0.3 needs whole rows on each rank: set b\.fsdp_config\.ulysses"):
        check_learner(ModelConfig(**COEF), divided, "b", "a")
    with pytest.raises(ConfigError, match=r"a\.router_aux_loss_coef=0.3 needs b\.strategy=fsdp2 or fsdp, not megatron"):
        check_learner(ModelConfig(**COEF), EngineChoice("megatron"), "b", "a")
    with pytest.raises(ConfigError, match=r"model\.router_aux_loss_coef=-1.0 is too small"):
        ModelConfig(router_aux_loss_coef=-1.0).check("model")
