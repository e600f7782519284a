"""Every training engine in a whole PPO run: two ranks under Ray, in its own layout, train as fsdp2 in one process does."""

from typing import Any

import pytest
from helpers import cuda_to_cpu
from helpers.run import STEPS, assert_same_training, roles, train

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
    "fsdp, tokens divided": ("fsdp", "fsdp_config.ulysses_sequence_parallel_size=2"),
    "megatron, stages": ("megatron", "megatron.pipeline_model_parallel_size=2"),
    "torchtitan, layers divided": ("torchtitan", "torchtitan.tensor_parallel_size=2"),
    "veomni, tokens divided": ("veomni", "veomni.ulysses_parallel_size=2"),
}


def run(config: Any) -> list[dict[str, Any]]:
    mapping = roles("ActorRolloutRef", "Critic")
    return train(
        config,
        {"global_pool": [2]},
        mapping,
        RayWorkerGroup,
        role_worker_mapping={Role.ActorRolloutRef: Policy, Role.Critic: Critic},
    )


@pytest.fixture(scope="module")
def expected(embedded_config_in, tmp_path_factory):
    """fsdp2 on one rank in this process."""
    config = embedded_config_in(tmp_path_factory.mktemp("expected"), *STEPS)
    return train(config, {"global_pool": [1]}, roles("ActorRolloutRef", "Critic"))


@pytest.mark.ray
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_run_is_that_of_fsdp2_in_one_process(ray_cluster, expected, embedded_config, layout):
    """The responses are the same tokens. Sums are rounded in another order, and updates carry that on: 1e-3 of each metric."""
    strategy, key = LAYOUTS[layout]
    chosen = [f"{place}.{what}" for place in ("actor_rollout_ref.actor", "critic") for what in (f"strategy={strategy}", key)]
    assert_same_training(run(embedded_config(*STEPS, *chosen)), expected, rel=1e-3)


@pytest.mark.ray
def test_an_actor_on_megatron_with_a_critic_on_fsdp2(ray_cluster, expected, embedded_config):
    actor = "actor_rollout_ref.actor"
    mixed = (f"{actor}.strategy=megatron", f"{actor}.megatron.tensor_model_parallel_size=2", "critic.strategy=fsdp2")
    assert_same_training(run(embedded_config(*STEPS, *mixed)), expected, rel=1e-3)
