"""The worker's side of a group: one host in a process holds the workers of all co-located roles and runs the calls sent
to them."""

import faulthandler
import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import LockstepError, ResourceError, WorkerError
from lockstep.protocol import DataProto
from lockstep.single_controller.base.dispatch import Call, awaited
from lockstep.single_controller.base.worker import ClassWithInitArgs, WorkerEnvironment, worker_environment

Rendezvous = tuple[str, int]
"""Address and port of the store where ranks meet."""

_STDERR = 2  # the file descriptor: sys.stderr may have been replaced by an object that faulthandler cannot write to

_process_group_users: set[int] = set()
"""The hosts in this process that share the process group one of them made; empty when it was made by someone else."""


class WorkerHost:
    """Holds named workers in this process. Call `setup` once, then `create` for each role, then `call` at will."""

    def __init__(self) -> None:
        self._environment = WorkerEnvironment()
        self.workers: dict[str, Any] = {}
        """By the name of their role."""
        self._store: dist.Store | None = None

    def open_rendezvous(self, address: str, timeout_s: float) -> Rendezvous:
        """Open, in the process of rank 0, the store where the other ranks meet it, at a port the system picks."""
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        return address, self._store.port

    def setup(
        self,
        environment: WorkerEnvironment,
        rendezvous: Rendezvous | None = None,
        *,
        start_timeout_s: float,
        timeout_s: float,
        num_threads: int | None = None,
    ) -> None:
        """Take a place in the group and join torch.distributed: gloo, and nccl for cuda tensors.

        A world of one needs no `rendezvous` and opens no port. `timeout_s` bounds every collective, `start_timeout_s`
        the meeting. A process group that this process already has is used as it is. Raises ResourceError when the
        device is not there, and when an existing process group has another rank or size.
        """
        if not faulthandler.is_enabled():
            faulthandler.enable(file=_STDERR)
        if environment.device == torch.device("cuda"):
            # Ray shows a process its own GPU only, and a local group has one process: the first GPU seen is the one meant.
            environment = replace(environment, device=torch.device("cuda", 0))
        self._environment = environment
        if num_threads is not None:
            torch.set_num_threads(max(1, min(num_threads, os.cpu_count() or 1)))
        if environment.device.type == "cuda":
            if not torch.cuda.is_available():
                raise ResourceError(f"{self.label()} is to run on {environment.device}, but torch sees no GPU here")
            torch.cuda.set_device(environment.device)
        self._join_process_group(rendezvous, start_timeout_s, timeout_s)

    def create(self, name: str, worker: ClassWithInitArgs, dump_stacks_after_s: float | None = None) -> None:
        """Build the worker of a role. What its constructor raises is raised."""
        with _stacks_after(dump_stacks_after_s), worker_environment(replace(self._environment, name=name)):
            self.workers[name] = worker()

    def call(self, name: str, method: str, call: Call, dump_stacks_after_s: float | None = None) -> Any:
        """Run a method for a driver in another process: rows come back on the CPU, exceptions as WorkerError with the
        traceback.

        The arguments are one object, because Ray fetches only whole arguments from its store. With `dump_stacks_after_s`, the
        stacks of all threads go to stderr if the method is still running then.
        """
        args, kwargs = call
        try:
            with _stacks_after(dump_stacks_after_s):
                result = awaited(getattr(self.workers[name], method)(*args, **kwargs))
            return result.to("cpu") if isinstance(result, DataProto) else result
        except Exception as error:
            raise WorkerError(self.label(name), _describe(error)) from None

    def label(self, name: str | None = None) -> str:
        """How errors name a role here: "critic rank 1 (pid 123, node x)"."""
        environment = self._environment
        return f"{name or environment.name} rank {environment.rank} (pid {os.getpid()}, node {socket.gethostname()})"

    def close(self) -> None:
        """Close the workers that can be closed and forget them all; destroy the process group if a host made it and no other host here
        uses it. May be called again."""
        for worker in self.workers.values():
            close = getattr(worker, "close", None)
            if callable(close):
                close()
        self.workers.clear()
        if id(self) in _process_group_users:
            _process_group_users.remove(id(self))
            if not _process_group_users and dist.is_initialized():
                dist.destroy_process_group()
        self._store = None

    def _join_process_group(self, rendezvous: Rendezvous | None, start_timeout_s: float, timeout_s: float) -> None:
        rank = self._environment.rank
        world_size = self._environment.world_size
        if dist.is_initialized():
            there = dist.get_rank(), dist.get_world_size()
            if there != (rank, world_size):
                raise ResourceError(
                    f"{self.label()} is to be rank {rank} of {world_size}, but torch.distributed in this process is "
                    f"already rank {there[0]} of {there[1]}; call torch.distributed.destroy_process_group() first"
                )
            if _process_group_users:
                _process_group_users.add(id(self))
            return
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._environment.device.type == "cuda" else "gloo",
            store=self._meeting_store(rendezvous, start_timeout_s),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        _process_group_users.add(id(self))

    def _meeting_store(self, rendezvous: Rendezvous | None, start_timeout_s: float) -> dist.Store:
        if self._environment.world_size == 1:
            return dist.HashStore()
        if self._store is None:
            if rendezvous is None:
                raise ValueError(f"{self._environment.world_size} ranks need a rendezvous to meet at, got None")
            host, port = rendezvous
            self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=start_timeout_s))
        return self._store


@contextmanager
def _stacks_after(seconds: float | None) -> Iterator[None]:
    if seconds is None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=False, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _describe(error: Exception) -> str:
    """The traceback; an error that is the user's to fix says its message first, so that it is not buried."""
    text = "".join(traceback.format_exception(error))
    return f"{type(error).__name__}: {error}\n\n{text}" if isinstance(error, LockstepError) else text
