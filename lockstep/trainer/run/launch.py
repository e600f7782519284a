"""From roles and pools to running workers: which role runs on which processes, checked against the machine; then groups of workers, each
with its model on its device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.config.trainer import RunConfig
from lockstep.errors import ConfigError
from lockstep.observability.spans import progress
from lockstep.planner import Load, SavedChoice
from lockstep.single_controller.base import ClassWithInitArgs, NodeResources, ResourcePool, RoleGroup, WorkerGroup, place
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.single_controller.ray import RayWorkerGroup, is_connected
from lockstep.trainer.run.memory import place_models

TRAINED, FROZEN = 16, 4
"""Bytes per parameter in float32: weight, gradient and two moments; or the weight alone."""
PROCESS_MEMORY = 1 << 30
"""Host memory of a worker process before any model: Python, torch and transformers take 0.4 to 0.6 GiB."""


@dataclass
class ResourcePoolManager:
    """Pools of processes, and the pool of each role.

    `resource_pool_spec` maps a pool's id to its processes on each node: `{"global_pool": [8, 8]}` is two nodes with 8 each. With GPUs a
    process is a GPU; without, it is a process on the CPUs. `mapping` gives the pool of each role: roles on one pool share processes.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Enum, str]
    resource_pool_dict: dict[str, ResourcePool] = field(default_factory=dict)
    """Pools by id, once created."""
    placement: dict[str, list[str]] = field(default_factory=dict)
    """The node of each process, by pool, once created."""

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise ConfigError(
                    f"{role} is mapped to pool {pool!r}, which is not in resource_pool_spec ({list(self.resource_pool_spec)})"
                )

    def create_resource_pool(
        self,
        nodes: Sequence[NodeResources] | None = None,
        use_gpu: bool = False,
        memory: Mapping[str, int] | None = None,
        roles: Iterable[Enum] | None = None,
    ) -> None:
        """Make the pools of these roles (None: all mapped roles) and find a node for every process.

        `nodes` are the available nodes; None means the Ray cluster this process is connected to, or else this machine. `memory` is the
        host memory in bytes that a process of each pool needs beside PROCESS_MEMORY. Raise ResourceError, with the missing amounts, before
        anything is started.
        """
        used = {self.mapping[role] for role in (self.mapping if roles is None else roles)}
        pools = [
            ResourcePool(counts, name=pool, use_gpu=use_gpu, memory_per_process=PROCESS_MEMORY + (memory or {}).get(pool, 0))
            for pool, counts in self.resource_pool_spec.items()
            if pool in used
        ]
        if nodes is None:
            nodes = (RayWorkerGroup if is_connected() else LocalWorkerGroup).nodes()
        self.placement = place(pools, nodes)
        self.resource_pool_dict = {pool.name: pool for pool in pools}

    def get_resource_pool(self, role: Enum) -> ResourcePool:
        """Return the pool of a role. Call create_resource_pool first."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of processes in all pools."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())


@dataclass(frozen=True)
class RoleSpec:
    """The workers of a role."""

    worker: ClassWithInitArgs
    """Their class and its arguments."""
    load: Callable[[int], Load]
    """The number of ranks -> what one of them computes at once."""
    host_bytes: int = 0
    """Host memory of its models on a machine without GPUs, over all ranks."""


@dataclass
class Workers:
    """The workers of a run. Roles may be members of any Enum: only their names matter."""

    section: RunConfig
    manager: ResourcePoolManager
    """The pool of each role."""
    group_cls: type[WorkerGroup]
    say: Callable[[str], None]
    """Tells the user something."""
    groups: list[WorkerGroup] = field(default_factory=list)
    """One per pool, once started."""
    by_role: dict[Enum, RoleGroup] = field(default_factory=dict)
    """The workers of each role, once started."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Pool -> the numbers chosen for its keys that are auto (planner/choices.py::SavedChoice), for the checkpoints."""

    def recall(self, found: tuple[Path, dict[str, Any]] | None) -> None:
        """Let `start` choose the same numbers as before the checkpoint, from its state. Checkpoints of versions with other fields are
        ignored."""
        numbers = {} if found is None else found[1].get("numbers", {})
        names = {field.name for field in fields(SavedChoice)}
        self.numbers |= {pool: own for pool, own in numbers.items() if own.keys() == names}

    def start(self, specs: Mapping[Enum, RoleSpec]) -> None:
        """Check the resources, start a process for each slot of the pools, load every role's model. If this fails, no process is left."""
        try:
            self._start(specs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for group in self.groups:
            group.close()
        self.groups.clear()

    def find(self, *names: str) -> RoleGroup | None:
        """Return the workers of the first of these names that is a role, of any Enum."""
        by_name = {role.name: group for role, group in self.by_role.items()}
        return next((by_name[name] for name in names if name in by_name), None)

    def _start(self, specs: Mapping[Enum, RoleSpec]) -> None:
        section = self.section
        manager = self.manager
        uses_gpu = section.device == "cuda"
        memory = dict.fromkeys(manager.resource_pool_spec, 0)
        by_pool: dict[str, dict[str, Enum]] = {}
        for role, spec in specs.items():
            pool = manager.mapping[role]
            by_pool.setdefault(pool, {})[str(role)] = role
            memory[pool] += 0 if uses_gpu else spec.host_bytes // sum(manager.resource_pool_spec[pool])
        manager.create_resource_pool(self.group_cls.nodes(), uses_gpu, memory, roles=specs)
        for pool, roles in by_pool.items():
            group = self.group_cls(
                manager.resource_pool_dict[pool],
                {name: specs[role].worker for name, role in roles.items()},
                placement=manager.placement[pool],
                device=section.device,
                timeout_s=section.worker_timeout_s,
                start_timeout_s=section.start_timeout_s,
            )
            self.groups.append(group)
            with progress(f"starting the workers of {pool}"):
                for name, view in group.spawn().items():
                    self.by_role[roles[name]] = view
        self._place_models(by_pool, specs)
        for number, view in enumerate(self.by_role.values(), start=1):
            if hasattr(view, "init_model"):
                with progress(f"loading the model of {view.name} ({number} of {len(self.by_role)})"):
                    view.init_model()
            if section.on_nonfinite == "skip" and hasattr(view, "skip_nonfinite"):
                view.skip_nonfinite()
        for view in self.by_role.values():
            if uses_gpu and hasattr(view, "warm_up"):
                with progress(f"compiling kernels for {view.name}"):
                    view.warm_up()
        for view in self.by_role.values():
            if not self.group_cls.in_driver and hasattr(view, "freeze_objects"):  # in the driver `Run.fit` does it, and undoes it
                view.freeze_objects()

    def _place_models(self, by_pool: Mapping[str, Mapping[str, Enum]], specs: Mapping[Enum, RoleSpec]) -> None:
        """Decide, for each device, which models are offloaded while others work, and tell the user."""
        if self.group_cls.in_driver:  # one process, one device
            by_pool = {", ".join(by_pool): {name: role for roles in by_pool.values() for name, role in roles.items()}}
        for pool, roles in by_pool.items():
            groups = {role: self.by_role[role] for role in roles.values()}
            loads = {role: specs[role].load(group.world_size) for role, group in groups.items()}
            before = self.numbers.get(pool)
            placed = place_models(pool, groups, loads, SavedChoice(**before) if before else None)
            if placed.kept is not None:
                self.numbers[pool] = asdict(placed.kept)
            if placed.text is not None:
                self.say(placed.text)
