"""The names that users write. A change here is a change of the interface."""

import inspect
import subprocess
import sys

import lockstep
from lockstep.trainer.ppo import ray_trainer


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_trainer_takes_the_tutorials_arguments():
    assert parameters(ray_trainer.RayPPOTrainer.__init__)[:7] == [
        "config", "tokenizer", "role_worker_mapping", "resource_pool_manager", "ray_worker_group_cls", "reward_fn", "val_reward_fn",
    ]  # fmt: skip
    assert parameters(ray_trainer.RayPPOTrainer.init_workers) == []
    assert parameters(ray_trainer.RayPPOTrainer.fit) == []
    assert parameters(ray_trainer.ResourcePoolManager)[:2] == ["resource_pool_spec", "mapping"]


def test_the_roles_have_the_tutorials_values():
    names = ["Actor", "Rollout", "ActorRollout", "Critic", "RefPolicy", "RewardModel", "ActorRolloutRef"]
    assert [(role.name, role.value) for role in ray_trainer.Role] == list(zip(names, range(7), strict=True))


def test_the_reward_manager_takes_the_tutorials_arguments():
    from lockstep.workers.reward_manager import RewardManager

    assert parameters(RewardManager.__init__)[:2] == ["tokenizer", "num_examine"]


def test_names_are_where_users_of_the_field_look_for_them():
    from lockstep.single_controller.base import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup  # noqa: F401
    from lockstep.single_controller.base.decorator import Dispatch, Execute, register  # noqa: F401
    from lockstep.single_controller.local import LocalWorkerGroup  # noqa: F401
    from lockstep.single_controller.ray import RayWorkerGroup  # noqa: F401
    from lockstep.utils.dataset.rl_dataset import RLHFDataset  # noqa: F401
    from lockstep.utils.reward_score import default_compute_score, gsm8k, math  # noqa: F401
    from lockstep.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker  # noqa: F401

    assert lockstep.DataProto.__name__ == "DataProto"
    assert lockstep.__all__ == ["DataProto", "__version__", "read_run"]
    assert parameters(lockstep.read_run) == ["folder"]


def test_importing_the_package_and_its_command_line_brings_neither_torch_nor_ray():
    code = "import sys, lockstep, lockstep.cli; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
