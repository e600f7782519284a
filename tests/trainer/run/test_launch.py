"""What is asked of workers when they start, in which order."""

from enum import Enum

import pytest

from lockstep.config.trainer import TrainerConfig
from lockstep.errors import ConfigError, ResourceError
from lockstep.planner.needs import Load
from lockstep.single_controller.base import ClassWithInitArgs, Dispatch, NodeResources, Worker, register
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.trainer.role import Role
from lockstep.trainer.run.launch import PROCESS_MEMORY, ResourcePoolManager, RoleSpec, Workers


class Part(Enum):
    TEACHER = "teacher"
    PUPIL = "pupil"

    def __str__(self):
        return self.value


class Noting(Worker):
    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self):
        self.asked.append(f"load {self.name}")

    @register(Dispatch.ONE_TO_ALL)
    def freeze_objects(self):
        self.asked.append(f"freeze {self.name}")


class LikeOtherProcesses(LocalWorkerGroup):
    in_driver = False


LOADED = ["load teacher", "load pupil"]


@pytest.mark.parametrize(
    ("group", "expected"),
    [(LikeOtherProcesses, [*LOADED, "freeze teacher", "freeze pupil"]), (LocalWorkerGroup, LOADED)],
    ids=["processes of their own", "the driver's"],
)
def test_workers_in_processes_of_their_own_freeze_their_objects_once_every_model_is_loaded(tmp_path, group, expected):
    asked = []
    manager = ResourcePoolManager({"pool": [1]}, dict.fromkeys(Part, "pool"))
    workers = Workers(TrainerConfig(default_local_dir=str(tmp_path), device="cpu"), manager, group, print)
    specs = {part: RoleSpec(ClassWithInitArgs(Noting, part.value, asked), lambda ranks: Load(1, 1, 1)) for part in Part}
    try:
        workers.start(specs)
    finally:
        workers.close()
    assert asked == expected


GIB = 1 << 30


class MyRole(Enum):
    Teacher = 7


def node(name="here", cpus=8.0, gpus=0.0, memory=64 * GIB):
    return NodeResources(name=name, cpus=cpus, gpus=gpus, memory=memory)


def manager(spec=None, mapping=None):
    return ResourcePoolManager(spec or {"global": [2]}, mapping or {Role.ActorRollout: "global"})


def test_roles_on_one_pool_share_it_and_any_enum_may_name_a_role():
    pools = manager({"global": [2], "own": [1]}, {Role.ActorRollout: "global", Role.Critic: "global", MyRole.Teacher: "own"})
    pools.create_resource_pool([node()])
    assert pools.get_resource_pool(Role.ActorRollout) is pools.get_resource_pool(Role.Critic)
    assert pools.get_resource_pool(MyRole.Teacher).world_size == 1
    assert pools.placement == {"global": ["here", "here"], "own": ["here"]}
    assert pools.get_n_gpus() == 3


def test_a_pool_that_no_role_uses_is_not_created():
    pools = manager({"global": [1], "spare": [1000]})
    pools.create_resource_pool([node()])
    assert set(pools.resource_pool_dict) == set(pools.placement) == {"global"}


def test_a_role_on_a_pool_that_is_not_there_is_an_error_that_names_both():
    with pytest.raises(ConfigError, match=r"critic is mapped to pool 'other'.*\['global'\]"):
        manager(mapping={Role.Critic: "other"})


def test_processes_need_their_own_memory_and_that_of_their_models():
    pools = manager()
    pools.create_resource_pool([node()], memory={"global": 3 * GIB})
    assert pools.get_resource_pool(Role.ActorRollout).memory_per_process == PROCESS_MEMORY + 3 * GIB


@pytest.mark.parametrize(
    ("spec", "use_gpu", "memory", "numbers"),
    [
        ([16], False, 0, ["needs 16 CPUs", "has 8 CPUs", "short: 8 CPUs"]),
        ([2], True, 0, ["2 GPUs", "0 GPUs", "short: 2 GPUs"]),
        ([2], False, 40 * GIB, ["82.0 GiB", "64.0 GiB", "short: 18.0 GiB"]),
        ([1, 1, 1], False, 0, ["on 3 node(s)", "on 1 node(s)", "short: 2 node(s)"]),
    ],
)
def test_what_is_short_is_said_in_numbers_before_anything_starts(spec, use_gpu, memory, numbers):
    pools = manager({"global": spec})
    with pytest.raises(ResourceError) as caught:
        pools.create_resource_pool([node()], use_gpu, {"global": memory})
    assert [number for number in numbers if number not in str(caught.value)] == []
    assert pools.resource_pool_dict == {}


def test_without_a_list_of_nodes_this_machine_counts():
    role = next(iter(Role))
    manager = ResourcePoolManager(resource_pool_spec={"p": [1]}, mapping={role: "p"})
    manager.create_resource_pool()
    assert manager.get_resource_pool(role).world_size == 1
    assert len(manager.placement["p"]) == 1
    too_many = ResourcePoolManager(resource_pool_spec={"p": [100_000]}, mapping={role: "p"})
    with pytest.raises(ResourceError, match="100000 CPUs"):
        too_many.create_resource_pool()
