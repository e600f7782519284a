"""What is asked of workers when they start, in which order."""

from enum import Enum

import pytest

from lockstep.config.trainer import TrainerConfig
from lockstep.planner.needs import Load
from lockstep.single_controller.base import ClassWithInitArgs, Dispatch, Worker, register
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.trainer.run.launch import RoleSpec, Workers
from lockstep.trainer.run.resources import ResourcePoolManager


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
