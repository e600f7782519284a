"""Every role, in every placement, does the same training."""

from enum import Enum

import pytest
from helpers.run import CLASSES, STEPS, assert_same_training, make_trainer, read_metrics, roles, train
from helpers.tiny import save_tiny_model

from lockstep.config.load import to_yaml
from lockstep.single_controller.base import Dispatch, Worker, register
from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.trainer.main_ppo import main
from lockstep.trainer.ppo.ray_trainer import Role


@pytest.fixture(scope="module")
def expected(embedded_config_in, tmp_path_factory):
    """Actor, rollout, reference and critic in this process: what every other placement must equal."""
    config = embedded_config_in(tmp_path_factory.mktemp("expected"), *STEPS)
    return train(config, {"global_pool": [1]}, roles("ActorRollout", "Critic", "RefPolicy"))


def test_a_fused_reference_and_separate_actor_and_rollout_equal_the_hybrid_engine(expected, embedded_config):
    fused = train(embedded_config(*STEPS), {"p": [1]}, roles("ActorRolloutRef", "Critic", pool="p"))
    assert_same_training(fused, expected)
    separate = train(embedded_config(*STEPS), {"p": [1]}, roles("Actor", "Rollout", "Critic", "RefPolicy", pool="p"))
    assert_same_training(separate, expected)


@pytest.mark.ray
def test_two_co_located_ranks_equal_one_process(ray_cluster, expected, embedded_config):
    metrics = train(embedded_config(*STEPS), {"global_pool": [2]}, roles("ActorRollout", "Critic", "RefPolicy"), RayWorkerGroup)
    assert_same_training(metrics, expected)


@pytest.mark.ray
def test_every_role_on_a_pool_of_its_own_equals_one_process(ray_cluster, expected, embedded_config):
    mapping = {Role.Actor: "actor", Role.Rollout: "rollout", Role.Critic: "critic", Role.RefPolicy: "rollout"}
    pools = {"actor": [1], "rollout": [2], "critic": [2]}
    assert_same_training(train(embedded_config(*STEPS), pools, mapping, RayWorkerGroup), expected)


@pytest.mark.ray
def test_a_reward_model_on_its_own_pool_scores_like_one_in_the_same_process(ray_cluster, embedded_config, tmp_path):
    more = [*STEPS, "reward_model.enable=true", f"reward_model.model.path={save_tiny_model(tmp_path / 'rm', score_head=True)}"]
    names = ("ActorRolloutRef", "Critic")
    split = train(
        embedded_config(*more, f"trainer.default_local_dir={tmp_path / 'split'}"),
        {"global_pool": [1], "reward": [2]},
        roles(*names) | {Role.RewardModel: "reward"},
        RayWorkerGroup,
    )
    together = train(
        embedded_config(*more, f"trainer.default_local_dir={tmp_path / 'together'}"),
        {"global_pool": [1]},
        roles(*names, "RewardModel"),
    )
    assert_same_training(split, together)


class OtherRole(Enum):
    ActorRollout = "policy"
    Critic = "value"
    Teacher = "teacher"


class Teacher(Worker):
    def __init__(self, config):
        self.batch_size = config.data.train_batch_size

    @register(Dispatch.ONE_TO_ALL)
    def lesson(self) -> int:
        return self.batch_size


def test_roles_of_another_enum_are_accepted_and_further_ones_get_a_group(embedded_config):
    config = embedded_config("trainer.total_training_steps=1", "algorithm.use_kl_in_reward=false")
    classes = {role: CLASSES.get(role.name, Teacher) for role in OtherRole}
    trainer = make_trainer(config, {"p": [1]}, dict.fromkeys(OtherRole, "p"), role_worker_mapping=classes)
    try:
        trainer.init_workers()
        assert trainer.worker_groups[OtherRole.Teacher].lesson() == [8]
        assert trainer.fit().steps == 1
    finally:
        trainer.close()
    assert read_metrics(config)[-1]["step"] == 1


@pytest.mark.ray
def test_the_program_puts_the_critic_on_its_own_pool_by_one_key(ray_cluster, expected, embedded_config, tmp_path, capsys):
    config = embedded_config(*STEPS, "critic.enable_resource_pool=true", f"trainer.default_local_dir={tmp_path / 'split'}")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert main(["--config", str(tmp_path / "config.yaml")]) == 0
    assert_same_training(read_metrics(config), expected)
