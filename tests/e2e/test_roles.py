"""Every role, in every placement, does the same training."""

from enum import Enum

import pytest
from helpers.run import CLASSES, STEPS, assert_same_training, make_trainer, read_metrics, roles, train
from helpers.tiny import save_tiny_model
from transformers import AutoModelForCausalLM

from lockstep.single_controller.base import Dispatch, Worker, register
from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.trainer.ppo.ray_trainer import Role


def test_a_fused_reference_and_separate_actor_and_rollout_equal_the_hybrid_engine(three_steps, embedded_config):
    fused = train(embedded_config(*STEPS), {"p": [1]}, roles("ActorRolloutRef", "Critic", pool="p"))
    assert_same_training(fused, three_steps)
    separate = train(embedded_config(*STEPS), {"p": [1]}, roles("Actor", "Rollout", "Critic", "RefPolicy", pool="p"))
    assert_same_training(separate, three_steps)


def test_a_given_adapter_reaches_a_rollout_of_its_own_before_the_first_step(embedded_config, embedded_task, tmp_path):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(embedded_task.model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    config = embedded_config(*STEPS, f"actor_rollout_ref.model.lora_adapter_path={tmp_path / 'adapter'}")
    hybrid = train(config, {"p": [1]}, roles("ActorRolloutRef", "Critic", pool="p"))
    separate = train(config, {"p": [1]}, roles("Actor", "Rollout", "Critic", "RefPolicy", pool="p"))
    assert hybrid[0]["actor/reward_kl_penalty"] > 0.1, "the adapter is not felt"
    assert_same_training(separate, hybrid)


@pytest.mark.ray
def test_every_role_on_a_pool_of_its_own_equals_one_process(ray_cluster, embedded_config, tmp_path):
    more = [*STEPS, "reward_model.enable=true", f"reward_model.model.path={save_tiny_model(tmp_path / 'rm', score_head=True)}"]
    mapping = {
        Role.Actor: "actor",
        Role.Rollout: "rollout",
        Role.RefPolicy: "rollout",
        Role.Critic: "critic",
        Role.RewardModel: "reward",
    }
    pools = {"actor": [1], "rollout": [2], "critic": [1], "reward": [2]}
    split = train(embedded_config(*more, f"trainer.default_local_dir={tmp_path / 'split'}"), pools, mapping, RayWorkerGroup)
    together = train(
        embedded_config(*more, f"trainer.default_local_dir={tmp_path / 'together'}"),
        {"global_pool": [1]},
        roles("ActorRolloutRef", "Critic", "RewardModel"),
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
