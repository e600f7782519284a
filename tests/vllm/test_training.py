"""PPO end to end with real vLLM."""

import pytest
from helpers.run import roles, train
from helpers.vllm_engines import needs_vllm

pytestmark = needs_vllm

VLLM = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.enforce_eager=true", "trainer.val_before_train=false")
ROLES = ("ActorRollout", "Critic", "RefPolicy")


def test_ppo_trains_and_the_sampler_follows_every_update(embedded_config) -> None:
    """In float32 its log-probs are the trainer's within 1e-4 after three updates as before: the pass that recomputes them is skipped."""
    config = embedded_config(*VLLM, "trainer.total_training_steps=4", "trainer.test_freq=4")
    metrics = train(config, {"p": [1]}, roles(*ROLES, pool="p"))
    assert len(metrics) == 4
    assert "timing_s/old_log_prob" in metrics[0]
    for row in metrics:
        assert 1 - 1e-4 < row["training/rollout_ratio_mean"] < 1 + 1e-4
        assert row["training/rollout_ratio_max"] < 1 + 2e-4
        assert row["actor/grad_norm"] > 0
    assert all("timing_s/old_log_prob" not in row for row in metrics[1:])
    assert any("val" in name for name in metrics[-1])


def test_old_log_probs_are_recomputed_when_the_bound_is_broken(embedded_config) -> None:
    """In bfloat16 vLLM rounds otherwise than the trainer: the metrics say how far it is, and the trainer's own log-probs are used."""
    dtype = "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"
    metrics = train(embedded_config(*VLLM, dtype, "trainer.total_training_steps=3"), {"p": [1]}, roles(*ROLES, pool="p"))
    for row in metrics:
        assert "timing_s/old_log_prob" in row
        assert 1e-4 < row["training/rollout_log_probs_diff_max"] < 1.0
        assert row["training/rollout_probs_diff_mean"] > 0
        assert 0.5 < row["training/rollout_ratio_ess"] <= 1.0


@pytest.mark.ray
def test_a_rollout_in_workers_of_its_own_gets_weights_by_broadcast(ray_cluster, embedded_config) -> None:
    from lockstep.single_controller.ray import RayWorkerGroup
    from lockstep.trainer.ppo.ray_trainer import Role

    mapping = {Role.Actor: "actor", Role.Rollout: "rollout", Role.Critic: "actor", Role.RefPolicy: "actor"}
    config = embedded_config(*VLLM, "trainer.total_training_steps=3", "actor_rollout_ref.rollout.weight_sync=broadcast")
    metrics = train(config, {"actor": [1], "rollout": [1]}, mapping, RayWorkerGroup)
    assert len(metrics) == 3
    assert all(row["training/rollout_ratio_max"] < 1 + 2e-4 for row in metrics)
