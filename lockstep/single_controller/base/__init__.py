"""Workers, the groups that call them, and the resources they run on."""

from lockstep.single_controller.base.decorator import Dispatch, Execute, register
from lockstep.single_controller.base.dispatch import register_dispatch_mode, share_rows
from lockstep.single_controller.base.resource_pool import NodeResources, ResourcePool, place
from lockstep.single_controller.base.worker import ClassWithInitArgs, Worker, WorkerEnvironment
from lockstep.single_controller.base.worker_group import Future, RoleGroup, WorkerGroup

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "Future",
    "NodeResources",
    "ResourcePool",
    "RoleGroup",
    "Worker",
    "WorkerEnvironment",
    "WorkerGroup",
    "place",
    "register",
    "register_dispatch_mode",
    "share_rows",
]
