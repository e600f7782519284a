"""Every training engine in a whole PPO run: two ranks under Ray, in its own layout, begin as fsdp2 in one process does, and learn."""

from statistics import mean
from typing import Any

import pytest
from helpers import cuda_to_cpu
from helpers.run import assert_same_training, roles, train

from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.trainer.ppo.ray_trainer import Role
from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


class Policy(ActorRolloutRefWorker):
    """megatron-core is written for CUDA."""

    def init_model(self) -> None:
        if self.config.actor.strategy == "megatron":
            cuda_to_cpu.install()
        super().init_model()


class Critic(TrainingWorker):
    """The same."""

    def init_model(self) -> None:
        if self.config.strategy == "megatron":
            cuda_to_cpu.install()
        super().init_model()


LAYOUTS = {
    "fsdp2, layers divided": ("fsdp2", "fsdp_config.tensor_parallel_size=2"),
    "fsdp, tokens divided": ("fsdp", "fsdp_config.ulysses_sequence_parallel_size=2"),
    "megatron, stages": ("megatron", "megatron.pipeline_model_parallel_size=2"),
    "torchtitan, layers divided": ("torchtitan", "torchtitan.tensor_parallel_size=2"),
    "veomni, tokens divided": ("veomni", "veomni.ulysses_parallel_size=2"),
}


RUN = (
    "trainer.total_training_steps=20", "trainer.val_before_train=false", "data.train_batch_size=32", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32", "actor_rollout_ref.actor.optim.lr=1e-3",
    "algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.use_kl_loss=true",
)  # fmt: skip
"""One update a batch, which computes its old log-probs itself; the reference's are a pass of the same engine."""


@pytest.fixture(scope="module")
def expected(embedded_config_in, tmp_path_factory):
    """fsdp2 on one rank in this process."""
    config = embedded_config_in(tmp_path_factory.mktemp("expected"), *RUN, "trainer.total_training_steps=3")
    return train(config, {"global_pool": [1]}, roles("ActorRolloutRef", "Critic"))


def assert_begins_alike_and_learns(config: Any, expected: list[dict[str, Any]]) -> None:
    """The first responses are the same tokens; sums are rounded in another order, and updates carry that on: 1e-3 of each metric.

    The share of words written backwards goes from 0.4 to 0.6 in these 20 steps with fsdp2.
    """
    metrics = train(
        config,
        {"global_pool": [2]},
        roles("ActorRolloutRef", "Critic"),
        RayWorkerGroup,
        role_worker_mapping={Role.ActorRolloutRef: Policy, Role.Critic: Critic},
    )
    assert_same_training(metrics[:3], expected, rel=1e-3)
    scores = [row["critic/score/mean"] for row in metrics]
    assert mean(scores[-5:]) > mean(scores[:2]) + 0.1, scores


@pytest.mark.ray
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_run_begins_as_fsdp2_in_one_process_and_learns(ray_cluster, expected, embedded_config, layout):
    strategy, key = LAYOUTS[layout]
    chosen = [f"{place}.{what}" for place in ("actor_rollout_ref.actor", "critic") for what in (f"strategy={strategy}", key)]
    assert_begins_alike_and_learns(embedded_config(*RUN, *chosen), expected)


@pytest.mark.ray
def test_an_actor_on_megatron_with_a_critic_on_fsdp2(ray_cluster, expected, embedded_config):
    actor = "actor_rollout_ref.actor"
    mixed = (f"{actor}.strategy=megatron", f"{actor}.megatron.tensor_model_parallel_size=2", "critic.strategy=fsdp2")
    assert_begins_alike_and_learns(embedded_config(*RUN, *mixed), expected)
