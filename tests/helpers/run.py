"""Build and run a trainer from a config, with chosen roles, pools and worker group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from lockstep.config import PPOConfig
from lockstep.rewards.manager import RewardManager
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
from lockstep.utils.tokenizer import hf_tokenizer
from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

CLASSES: dict[str, type] = {
    "Actor": ActorRolloutRefWorker,
    "Rollout": ActorRolloutRefWorker,
    "ActorRollout": ActorRolloutRefWorker,
    "RefPolicy": ActorRolloutRefWorker,
    "ActorRolloutRef": ActorRolloutRefWorker,
    "Critic": TrainingWorker,
    "RewardModel": TrainingWorker,
}


COMPARED = (
    "actor/pg_loss",
    "actor/grad_norm",
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/score/mean",
)
KL = ("actor/reward_kl_penalty", "actor/kl_loss")
STEPS = ("trainer.total_training_steps=3", "trainer.val_before_train=false", "actor_rollout_ref.actor.ppo_mini_batch_size=4")


def assert_same_training(metrics: list[dict[str, Any]], expected: list[dict[str, Any]], rel: float = 1e-4) -> None:
    """The responses are the same tokens, so scores are equal; sums are rounded in another order: 1e-4 of the value, or 1e-6."""
    assert len(metrics) == len(expected) == 3
    for row, reference in zip(metrics, expected, strict=True):
        (kl,) = (name for name in KL if name in reference)
        for name in (*COMPARED, kl):
            assert row[name] == pytest.approx(reference[name], rel=rel, abs=1e-6), (row["step"], name)


def make_trainer(
    config: PPOConfig, pools: Mapping[str, list[int]], mapping: Mapping[Enum, str], group: Any = LocalWorkerGroup, **more: Any
) -> RayPPOTrainer:
    """A trainer whose roles are the keys of `mapping`; `more` goes to its constructor."""
    tokenizer = hf_tokenizer(str(config.actor_rollout_ref.model.path))
    arguments: dict[str, Any] = {
        "role_worker_mapping": {role: CLASSES.get(role.name) for role in mapping},
        "reward_fn": RewardManager(tokenizer=tokenizer, num_examine=0, num_workers=1),
        "val_reward_fn": RewardManager(tokenizer=tokenizer, num_examine=0, num_workers=1),
    }
    return RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        resource_pool_manager=ResourcePoolManager(resource_pool_spec=dict(pools), mapping=dict(mapping)),
        ray_worker_group_cls=group,
        **arguments | more,
    )


def train(
    config: PPOConfig, pools: Mapping[str, list[int]], mapping: Mapping[Enum, str], group: Any = LocalWorkerGroup, **more: Any
):
    """Run to the end; returns the metrics of every logged step."""
    trainer = make_trainer(config, pools, mapping, group, **more)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.close()
    return read_metrics(config)


def read_metrics(config: PPOConfig) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (config.trainer.run_dir / "metrics.jsonl").read_text().splitlines()]


def roles(*names: str, pool: str = "global_pool") -> dict[Enum, str]:
    """Those roles, all on one pool."""
    return {Role[name]: pool for name in names}
