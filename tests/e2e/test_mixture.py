"""GRPO on a mixture of experts, from start to end: with adapters, a resume, a start from peft's folder, and with the sampler's routing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.letters import num_letters
from helpers.mixtures import MIXTURES
from helpers.run import roles, train
from helpers.tiny import save_tiny_model

from lockstep.rewards.manager import RewardManager
from lockstep.utils.tokenizer import hf_tokenizer

GRPO = (
    "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.val_before_train=false",
    "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.save_freq=1", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5", "actor_rollout_ref.model.recompute=full",
)  # fmt: skip
LORA = "actor_rollout_ref.model.lora_rank=4"
GAP = "training/rollout_log_probs_diff_max"

Grpo = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def grpo(embedded_config_in: Callable[..., Any], tmp_path: Path) -> Grpo:
    """`grpo(folder, family, steps, "key=value", ...)`: the steps' metrics."""

    def run(name: str, family: str, steps: int, *more: str) -> list[dict[str, Any]]:
        path = save_tiny_model(tmp_path / family, family, **MIXTURES.get(family, {}))
        last = (f"actor_rollout_ref.model.path={path}", f"trainer.total_training_steps={steps}")
        reward = RewardManager(hf_tokenizer(path), num_examine=0, compute_score=num_letters, num_workers=1)
        config = embedded_config_in(tmp_path / name, *GRPO, *last, *more)
        names = ("ActorRolloutRef", "Critic") if config.use_critic else ("ActorRolloutRef",)
        return train(config, {"p": [1]}, roles(*names, pool="p"), reward_fn=reward)

    return run


def test_adapters_sample_as_they_train_resume_and_start_from_pefts_folder(grpo: Grpo, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    whole = grpo("whole", "qwen2_moe", 3, LORA)
    assert all(row[GAP] < 5e-5 for row in whole)
    assert abs(whole[-1]["actor/reward_kl_penalty"]) > 1e-3, "the adapters have learned nothing, so their gap says nothing"
    rows = {row["step"]: row for row in grpo("resumed", "qwen2_moe", 1, LORA) + grpo("resumed", "qwen2_moe", 3, LORA)}
    for row in whole:
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "moe/aux_loss", "moe/max_load"):
            assert rows[row["step"]][name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), (row["step"], name)
    folder = next((tmp_path / "whole").glob("global_step_3/**/adapter"))
    (given,) = grpo("given", "qwen2_moe", 1, f"actor_rollout_ref.model.lora_adapter_path={folder}")
    assert given[GAP] < 5e-5
    assert abs(given["actor/reward_kl_penalty"]) > 1e-3


def test_the_routers_of_a_critic_have_metrics_of_their_own(grpo: Grpo, tmp_path: Path) -> None:
    """Under one name, the actor's would stand for both, and those of the critic for an actor that has none."""
    gae = "algorithm.adv_estimator=gae"
    (both,) = grpo("both", "mixtral", 1, gae, LORA, "critic.optim.lr=1e-2", "critic.ppo_epochs=2")
    critic = save_tiny_model(tmp_path / "critic", "qwen3_moe", **MIXTURES["qwen3_moe"])
    (one,) = grpo("one", "llama", 1, gae, f"critic.model.path={critic}")
    for name in ("aux_loss", "max_load", "idle_experts"):
        assert both[f"critic/moe/{name}"] >= 0.0
        assert both[f"moe/{name}"] >= 0.0
        assert f"critic/moe/{name}" in one
        assert f"moe/{name}" not in one
    assert both["critic/moe/aux_loss"] != both["moe/aux_loss"], "the critic has learned between two passes, the actor has not"


def test_in_bfloat16_the_samplers_routing_brings_sampler_and_trainer_together(grpo: Grpo) -> None:
    """The first step's samples are the same; its log-probs are held against the trainer's."""
    keys = ("actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", "actor_rollout_ref.rollout.exactness_bound=0")
    (own,) = grpo("own", "olmoe", 1, *keys)
    (kept,) = grpo("kept", "olmoe", 1, *keys, "actor_rollout_ref.rollout.router_replay=true")
    assert own["critic/score/mean"] == kept["critic/score/mean"]
    assert "moe/rerouted" not in own
    assert kept["moe/rerouted"] > 0.0
    assert kept[GAP] < own[GAP]
    assert kept["training/rollout_probs_diff_mean"] < own["training/rollout_probs_diff_mean"]
