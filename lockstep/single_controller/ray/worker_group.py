"""A group of Ray actors, each a `WorkerHost` in a process of its own.

```text
spawn:  place -> an actor per rank, on its node -> rank 0 opens the rendezvous -> all join -> build each role's worker
call:   put each rank's arguments in the object store -> submit -> wait (first failure, deadline) -> collect
```
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from lockstep.errors import ConfigError, ResourceError, WorkerDied, WorkerError
from lockstep.single_controller.base.channel import inbox
from lockstep.single_controller.base.decorator import Registration
from lockstep.single_controller.base.dispatch import Collect, find_mode
from lockstep.single_controller.base.host import Rendezvous, WorkerHost
from lockstep.single_controller.base.resource_pool import NodeResources, place
from lockstep.single_controller.base.worker import WorkerEnvironment
from lockstep.single_controller.base.worker_group import WorkerGroup
from lockstep.single_controller.ray.cluster import import_ray
from lockstep.single_controller.ray.future import RayFuture
from lockstep.single_controller.ray.node_watch import NodeWatch, connect_all

_PLACEMENT_PATIENCE_S = 5.0
_GOODBYE_S = 5.0
_PROBE_S = 2.0


class RayWorkerGroup(WorkerGroup):
    """A `WorkerGroup` of Ray actors. Ray must be running: `ray.init()` or `lockstep.single_controller.ray.connect()`.

    Arguments and results are copied between processes. Raises MissingExtra without the package, ConfigError for device
    "cuda" on a pool without GPUs.
    """

    heartbeat_s = 60.0
    """How often a long wait says on stderr which ranks it waits for."""
    unreachable_s = 15.0
    """A node that cannot be reached for so long is lost."""

    def _prepare(self) -> None:
        self._ray = import_ray()
        if torch.device(self.device).type == "cuda" and not self.resource_pool.use_gpu:
            raise ConfigError(f"device {self.device!r} needs GPUs, but pool {self.resource_pool.name!r} has use_gpu=False")
        self._actors: list[Any] = []
        self._labels: list[str] = []
        self._watch: NodeWatch | None = None
        self._placed: list[str] = []

    @classmethod
    def nodes(cls) -> list[NodeResources]:
        """The alive nodes of the cluster, by Ray's node id, with what is free on them."""
        _running_ray()
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [_node(name, free.get(name, {})) for name in _alive_nodes()]

    def _start(self) -> None:
        _running_ray()
        deadline = time.monotonic() + self.start_timeout_s
        placement = self._placement or self._place()
        nodes = _alive_nodes()
        unknown = sorted(set(placement) - set(nodes))
        if unknown:
            raise ResourceError(f"placement names nodes that are not alive in this cluster: {unknown}; alive: {sorted(nodes)}")
        threads = [max(1, int(nodes[node]["Resources"].get("CPU", 1)) // placement.count(node)) for node in placement]
        self._is_on_one_machine = set(placement) == {self._ray.get_runtime_context().get_node_id()}
        self._watch_nodes(placement, nodes)
        role = "+".join(self._classes)
        self._labels = [f"{role} rank {rank} (node {node})" for rank, node in enumerate(placement)]
        self._actors = [self._actor(node, count) for node, count in zip(placement, threads, strict=True)]
        environments = [
            WorkerEnvironment(rank, self.world_size, placement[:rank].count(node), torch.device(self.device), role)
            for rank, node in enumerate(placement)
        ]
        self._join(environments, threads, nodes[placement[0]]["NodeManagerAddress"], deadline)
        self._labels = self._wait([actor.label.remote() for actor in self._actors], "start-up", deadline)
        for name, worker in self._classes.items():
            shared = self._ray.put(worker)
            left = _lead(max(0.0, deadline - time.monotonic()))
            built = [actor.create.remote(name, shared, left) for actor in self._actors]
            self._wait(built, f"{name}'s constructor", deadline)

    def _watch_nodes(self, placement: list[str], nodes: dict[str, dict[str, Any]]) -> None:
        """From now on, know when one of the group's other machines cannot be reached."""
        here = self._ray.get_runtime_context().get_node_id()
        self._placed = placement
        away = {node: (nodes[node]["NodeManagerAddress"], nodes[node]["NodeManagerPort"]) for node in placement if node != here}
        if away:
            self._watch = NodeWatch(away)
            self._watch.start()

    def _lost(self, task: str) -> WorkerDied | None:
        """The error of the ranks on a node that cannot be reached."""
        for node, why in (self._watch.unreachable(self.unreachable_s) if self._watch is not None else {}).items():
            _unreachable.add(node)
            ranks = ", ".join(label for label, place in zip(self._labels, self._placed, strict=True) if place == node)
            return WorkerDied(ranks, f"during {task}: its node {why}")
        return None

    def _join(self, environments: list[WorkerEnvironment], threads: list[int], address: str, deadline: float) -> None:
        """Let the actors meet at rank 0 (`address` is its node) and form one torch.distributed world."""
        rendezvous: Rendezvous | None = None
        if self.world_size > 1:
            opened = self._actors[0].open_rendezvous.remote(address, self.start_timeout_s)
            rendezvous = self._wait([opened], "opening the rendezvous", deadline)[0]
        timeouts = {"start_timeout_s": self.start_timeout_s, "timeout_s": self.timeout_s}
        joining = [
            actor.setup.remote(environment, rendezvous, num_threads=num_threads, **timeouts)
            for actor, environment, num_threads in zip(self._actors, environments, threads, strict=True)
        ]
        self._wait(joining, "joining torch.distributed", deadline)

    def _place(self) -> list[str]:
        """Nodes for this pool alone. Ray's view of what is free lags behind actors that just ended, so a refusal is
        tried again, unless the pool would not fit on an empty cluster either."""
        place([self.resource_pool], [_node(name, node["Resources"]) for name, node in _alive_nodes().items()])
        until = time.monotonic() + _PLACEMENT_PATIENCE_S
        while True:
            try:
                return place([self.resource_pool], self.nodes())[self.resource_pool.name]
            except ResourceError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.2)

    def _actor(self, node: str, num_threads: int) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pool = self.resource_pool
        options: dict[str, Any] = {
            "num_cpus": pool.cpus_per_process,
            "num_gpus": 1 if pool.use_gpu else 0,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            # Read when the process loads its maths libraries, which is before any of our code runs.
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}},
        }
        if pool.memory_per_process:
            options["memory"] = pool.memory_per_process
        return self._ray.remote(WorkerHost).options(**options).remote()

    def receiving(self, handle: Callable[[Any], None]) -> AbstractContextManager[Callable[[Any], None]]:
        """See `WorkerGroup.receiving`; over a `channel`, which nobody outside this machine reaches while all workers are on it."""
        return inbox("127.0.0.1" if self._is_on_one_machine else str(self._ray.util.get_node_ip_address()), handle)

    def caller(self, role: str, method: str, registration: Registration) -> Callable[..., Any]:
        """See `WorkerGroup.caller`."""
        plan = find_mode(registration.dispatch_mode)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.check_usable()
            calls, collect = plan(args, kwargs, self.world_size)
            # Everything is serialised before anything is sent: an argument that cannot be pickled must not leave half
            # the ranks at work. Ranks with the same arguments share one copy.
            stored = {id(one): self._ray.put(one) for one in calls}
            try:
                refs = [
                    actor.call.remote(role, method, stored[id(one)], _lead(self.timeout_s))
                    for actor, one in zip(self._actors, calls, strict=False)
                ]
            except BaseException as error:  # an interrupt: ranks that have the call would wait in it for those that have not
                why = f"{role}.{method} had reached some of them when it was broken off ({type(error).__name__})"
                self._fail(WorkerDied(", ".join(self._labels), why))
                raise
            future = self._future(refs, f"{role}.{method}", self.timeout_s, collect)
            return future.get() if registration.blocking else future

        return call

    def _wait(self, refs: Sequence[Any], task: str, deadline: float) -> list[Any]:
        return self._future(refs, task, max(0.0, deadline - time.monotonic()), list).get()

    def _future(self, refs: Sequence[Any], task: str, timeout_s: float, collect: Collect) -> RayFuture:
        return RayFuture(refs, self._labels, task, timeout_s, self.heartbeat_s, collect, self._fail, self._lost)

    def _fail(self, error: WorkerError) -> WorkerError:
        """Break the group: remember the first error and end every process, as others may wait for the failed one
        forever."""
        if self._closed:
            return WorkerDied(error.worker, "the group was closed while the call was out")
        if self._error is None:
            self._error = error
            self._kill()
        return self._error

    def _stop(self) -> None:
        if not self._ray.is_initialized():
            return  # the actors ended with Ray
        try:
            if self._error is None and self._actors:
                self._ray.wait([actor.close.remote() for actor in self._actors], num_returns=len(self._actors), timeout=_GOODBYE_S)
        finally:  # also when whoever waits is interrupted
            self._kill()

    def _kill(self) -> None:
        """Kill the actors and wait, within bounds, until Ray knows that they are dead."""
        if self._watch is not None:
            self._watch.stop()
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        actors = self._actors
        self._actors = []
        if actors:
            self._ray.wait([actor.label.remote() for actor in actors], num_returns=len(actors), timeout=_GOODBYE_S)


def _running_ray() -> Any:
    ray = import_ray()
    if not ray.is_initialized():
        raise ResourceError("Ray is not running in this process: call ray.init() first, or start with lockstep.trainer.main_ppo")
    return ray


_unreachable: set[str] = set()
"""Nodes that could not be reached when a group was lost."""


def _alive_nodes() -> dict[str, dict[str, Any]]:
    """Ray's description of each alive node, by node id. Of those that were lost, which Ray may not know yet, only who can be reached."""
    nodes = {node["NodeID"]: node for node in import_ray().nodes() if node["Alive"]}
    lost = {name: (nodes[name]["NodeManagerAddress"], nodes[name]["NodeManagerPort"]) for name in _unreachable & nodes.keys()}
    _unreachable.difference_update(connect_all(lost, _PROBE_S))
    return {name: node for name, node in nodes.items() if name not in _unreachable}


def _node(name: str, resources: dict[str, float]) -> NodeResources:
    return NodeResources(name, *(resources.get(kind, 0.0) for kind in ("CPU", "GPU", "memory")))


def _lead(timeout_s: float) -> float:
    """When a worker shows its stacks: early enough to reach the log before the driver's deadline ends the process."""
    return max(0.001, timeout_s - min(5.0, 0.2 * timeout_s))
