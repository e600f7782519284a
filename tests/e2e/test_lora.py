"""GRPO with adapters (LoRA), from start to end: what samples is what trains, also after a resume and from a folder of peft's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.run import roles, train

pytest.importorskip("peft")
GRPO = (
    "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.val_before_train=false",
    "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.save_freq=2",
)  # fmt: skip
LORA = "actor_rollout_ref.model.lora_rank=4"
GAP = "training/rollout_log_probs_diff_max"


def run(config: Any) -> list[dict[str, Any]]:
    return train(config, {"p": [1]}, roles("ActorRolloutRef", pool="p"))


def test_sampler_and_trainer_agree_as_without_adapters(embedded_config_in: Callable[..., Any], tmp_path: Path) -> None:
    def grpo(name: str, steps: int, *more: str) -> list[dict[str, Any]]:
        return run(embedded_config_in(tmp_path / name, *GRPO, f"trainer.total_training_steps={steps}", *more))

    whole, adapted = grpo("whole", 4), grpo("adapted", 4, LORA)
    bound = 1.1 * max(2e-5, *(row[GAP] for row in whole))
    assert all(row[GAP] <= bound for row in adapted)
    assert adapted[-1]["actor/reward_kl_penalty"] > 1e-3, "the adapters have learned nothing, so their gap says nothing"

    # The same with an end and a resume in between.
    first = grpo("resumed", 2, LORA)
    resumed = grpo("resumed", 4, LORA)
    rows = {row["step"]: row for row in first + resumed}
    for row in adapted:
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert rows[row["step"]][name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), (row["step"], name)

    # From the folder that peft reads.
    folder = next((tmp_path / "adapted").glob("global_step_4/**/adapter"))
    given = grpo("given", 1, f"actor_rollout_ref.model.lora_adapter_path={folder}")
    assert given[0][GAP] <= bound
    assert given[0]["actor/reward_kl_penalty"] > 1e-3
