"""What a worker class is built on: a plain class that knows its place among its peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import ConfigError

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class WorkerEnvironment:
    """A worker's place among its peers."""

    rank: int = 0
    """Position in the group, 0..world_size-1."""
    world_size: int = 1
    """Number of workers in the group."""
    local_rank: int = 0
    """Position among the group's workers on the same node."""
    device: torch.device = _CPU
    """The device this process computes on."""
    name: str = "worker"
    """The role, as in error messages."""


_current: ContextVar[WorkerEnvironment] = ContextVar("lockstep_worker_environment")


@contextmanager
def worker_environment(environment: WorkerEnvironment) -> Iterator[None]:
    """Workers constructed inside take this place."""
    token = _current.set(environment)
    try:
        yield
    finally:
        _current.reset(token)


class Worker:
    """Base class of workers: `rank`, `world_size`, `local_rank` and `device`, there from the first line of the
    constructor on.

    A subclass has any constructor it likes and need not call this one. A worker that no group hosts is rank 0 of 1 on
    the CPU.
    """

    rank: int
    """Position in the group."""
    world_size: int
    """Number of workers in the group."""
    local_rank: int
    """Position among the group's workers on this node."""
    device: torch.device
    """The device to compute on."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        # Here rather than in __init__, so that a subclass's constructor sees its rank before (or without) calling
        # super().
        worker = super().__new__(cls)
        place = _current.get(WorkerEnvironment())
        for name in ("rank", "world_size", "local_rank", "device"):
            setattr(worker, name, getattr(place, name))
        return worker

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool = True) -> None:
        """verl's way to say which share of the rows a rank gets. Raises ConfigError for another share than its own: every rank has one."""
        if dp_rank != self.rank or not is_collect:
            raise ConfigError(
                f"rank {self.rank} asks for the rows of data-parallel rank {dp_rank} (is_collect={is_collect}) in mesh {mesh_name!r}; here "
                "every rank gets rows of its own: share them inside the worker, or use a role of Lockstep's (workers/engine_workers.py)"
            )


class ClassWithInitArgs:
    """A class and its constructor's arguments, to be built later in another process by calling this object.

    Of a class that `ray.remote` has wrapped, the class itself.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        wrapped = getattr(getattr(cls, "__ray_metadata__", None), "modified_class", cls)
        self.cls: type = getattr(wrapped, "__ray_actor_class__", wrapped)
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """Build it."""
        return self.cls(*self.args, **self.kwargs)
