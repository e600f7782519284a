"""A group of one process, which is this one: no Ray, no threads, no copies, so a debugger steps from the driver into
the worker."""

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch

from lockstep.errors import ConfigError
from lockstep.single_controller.base.decorator import Registration
from lockstep.single_controller.base.dispatch import awaited, find_mode
from lockstep.single_controller.base.host import WorkerHost
from lockstep.single_controller.base.resource_pool import NodeResources
from lockstep.single_controller.base.worker import WorkerEnvironment
from lockstep.single_controller.base.worker_group import Future, WorkerGroup


class LocalWorkerGroup(WorkerGroup):
    """A `WorkerGroup` whose only rank lives in the calling process.

    Arguments are passed by reference. A worker's exception is raised as it is, at the call (also with blocking=False),
    and leaves the group usable. A call in the own process cannot be abandoned, so `timeout_s` bounds only collectives.
    Several local groups share one process group. Raises ConfigError for a world size other than 1.
    """

    in_driver = True

    def _prepare(self) -> None:
        pool = self.resource_pool
        if pool.world_size != 1:
            raise ConfigError(
                f"LocalWorkerGroup runs one process, but pool {pool.name!r} asks for {pool.world_size} ({pool.store}); "
                "use ray_worker_group_cls=RayWorkerGroup (trainer.worker_group=ray)"
            )
        self._host = WorkerHost()

    @classmethod
    def nodes(cls) -> list[NodeResources]:
        """This machine."""
        memory = psutil.virtual_memory().available
        return [NodeResources(platform.node(), os.cpu_count() or 1, torch.cuda.device_count(), memory)]

    def _start(self) -> None:
        environment = WorkerEnvironment(device=torch.device(self.device), name="+".join(self._classes))
        self._host.setup(environment, start_timeout_s=self.start_timeout_s, timeout_s=self.timeout_s)
        for name, worker in self._classes.items():
            self._host.create(name, worker)

    def receiving(self, handle: Callable[[Any], None]) -> AbstractContextManager[Callable[[Any], None]]:
        """The worker calls `handle` itself."""
        return nullcontext(handle)

    def caller(self, role: str, method: str, registration: Registration) -> Callable[..., Any]:
        """See `WorkerGroup.caller`. Between the caller and the worker's method there is this one frame."""
        workers = self._host.workers
        plan = find_mode(registration.dispatch_mode)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._closed:
                self.check_usable()
            ((args, kwargs),), collect = plan(args, kwargs, 1)
            value = collect([awaited(getattr(workers[role], method)(*args, **kwargs))])
            return value if registration.blocking else _Completed(value)

        return call

    def _stop(self) -> None:
        self._host.close()


class _Completed(Future):
    """A value that is there already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, timeout_s: float | None = None) -> Any:
        return self._value

    def done(self) -> bool:
        return True
