"""The driver's side: a group of identical processes, each holding one worker of every role, called as if they were one
object."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lockstep.errors import ConfigError, WorkerDied, WorkerError
from lockstep.single_controller.base.decorator import Dispatch, Registration, registered_methods
from lockstep.single_controller.base.resource_pool import NodeResources, ResourcePool
from lockstep.single_controller.base.worker import ClassWithInitArgs


class Future(ABC):
    """What a call with `blocking=False` returns: a value that workers may still be computing."""

    @abstractmethod
    def get(self, timeout_s: float | None = None) -> Any:
        """Wait and return the collected value; a second call returns it again.

        The deadline is `timeout_s` from now, or the group's own, counted from the call, when it is None. Passing it is
        a failure of the group, so poll with `done()` instead of short timeouts. Raises WorkerError, WorkerDied or
        WorkerTimeout.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether `get` would return or raise at once."""


class WorkerGroup(ABC):
    """One process for each slot of a resource pool, with one worker of each role in it.

    `ray_cls_with_init` is one class, or role name -> class for co-located roles. `placement` names the node of each
    rank (as `place` returns it). A call must answer within `timeout_s`, start-up within `start_timeout_s`. Nothing runs
    before `spawn()`.

    After a WorkerError, WorkerDied or WorkerTimeout the group is broken: its processes are ended and every further call
    raises the first error. A group of one class also has that class's registered methods itself: `group.method(...)`.
    """

    in_driver: bool = False
    """Whether the workers live in the driver's own process."""

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: ClassWithInitArgs | dict[str, ClassWithInitArgs],
        *,
        timeout_s: float,
        start_timeout_s: float,
        placement: list[str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.resource_pool = resource_pool
        self.world_size = resource_pool.world_size
        if isinstance(ray_cls_with_init, ClassWithInitArgs):
            ray_cls_with_init = {ray_cls_with_init.cls.__name__: ray_cls_with_init}
        self._classes = dict(ray_cls_with_init)
        if not self._classes:
            raise ConfigError("a worker group needs at least one class, got an empty dict")
        if placement is not None and len(placement) != self.world_size:
            raise ConfigError(
                f"placement names {len(placement)} nodes, but pool {resource_pool.name!r} has {self.world_size} processes"
            )
        self.device = device
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self._placement = placement
        self._roles: dict[str, RoleGroup] = {}
        self._error: WorkerError | None = None
        self._closed = False
        self._prepare()

    @classmethod
    @abstractmethod
    def nodes(cls) -> list[NodeResources]:
        """What the machine or cluster has free, node by node."""

    def spawn(self) -> dict[str, RoleGroup]:
        """Start the processes, build the workers, and return a view for each role. A second call returns the same
        views.

        Raises what a constructor raised (as WorkerError when it ran in another process), or WorkerDied, WorkerTimeout,
        ResourceError; no process is left then.
        """
        self.check_usable()
        if not self._roles:
            roles = {name: RoleGroup(self, name, worker.cls) for name, worker in self._classes.items()}
            try:
                self._start()
            except BaseException:
                self.close()
                raise
            self._roles = roles
        return dict(self._roles)

    def close(self) -> None:
        """End the processes. May be called again, and after a failure."""
        if not self._closed:
            self._closed = True
            self._stop()

    def __enter__(self) -> WorkerGroup:
        self.spawn()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        # Only for names that are not the group's own. Private ones must fail plainly while the group is half built or
        # being copied.
        if name.startswith("_"):
            raise AttributeError(name)
        if not self._roles:
            raise AttributeError(f"no {name!r} on this group yet: call spawn() first")
        if len(self._roles) > 1:
            raise AttributeError(f"{name!r} is ambiguous: this group has the roles {list(self._roles)}; use spawn()[role].{name}")
        return getattr(next(iter(self._roles.values())), name)

    def check_usable(self) -> None:
        """Raise the group's first error if it is broken, WorkerDied if it is closed."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise WorkerDied("+".join(self._classes), "the group was closed; make a new one")

    @abstractmethod
    def caller(self, role: str, method: str, registration: Registration) -> Callable[..., Any]:
        """The function that calls a method of the workers of a role: what `group.method` is.

        It returns what the registration's mode collects, or a Future of it where the registration does not block. It raises as
        `check_usable` and `Future.get` do, and ValueError for arguments that do not suit the mode. An unknown mode is a ValueError here.
        """

    @abstractmethod
    def receiving(self, handle: Callable[[Any], None]) -> AbstractContextManager[Callable[[Any], None]]:
        """Something to pass to a worker's method that sends messages to `handle` while the method still runs."""

    @abstractmethod
    def _prepare(self) -> None:
        """Check that this kind of group can serve the pool; called last by the constructor. Starts nothing."""

    @abstractmethod
    def _start(self) -> None:
        """Start the processes and build the workers."""

    @abstractmethod
    def _stop(self) -> None:
        """End the processes, in whatever state they are; called once."""


class RoleGroup:
    """The workers of one role as one object: each registered method of their class is a method here."""

    def __init__(self, group: WorkerGroup, name: str, cls: type) -> None:
        self.name = name
        self.world_size = group.world_size
        self.receiving = group.receiving
        self._group = group
        self._registered = registered_methods(cls)
        taken = {*dir(group), *dir(self)}
        for method, registration in self._registered.items():
            if method in taken:
                raise ConfigError(f"{cls.__name__}.{method} cannot be registered: groups have a {method!r} of their own; rename it")
            setattr(self, method, functools.wraps(getattr(cls, method))(group.caller(name, method, registration)))

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method, registered or not, with the same arguments on every rank; the list of results."""
        return self._group.caller(self.name, method, Registration(Dispatch.ONE_TO_ALL, blocking=True))(*args, **kwargs)

    def execute_rank_zero(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method, registered or not, on rank 0; its result."""
        return self._group.caller(self.name, method, Registration(Dispatch.RANK_ZERO, blocking=True))(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"role {self.name!r} has no registered method {name!r}; registered: {list(self._registered)}. "
            "Mark it with @register, or use execute_all"
        )
