"""ResourcePoolManager: which role runs on which processes, checked against what the machine or cluster has."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from lockstep.errors import ConfigError
from lockstep.single_controller.base import NodeResources, ResourcePool, place
from lockstep.single_controller.local import LocalWorkerGroup
from lockstep.single_controller.ray import RayWorkerGroup, is_connected

PROCESS_MEMORY = 1 << 30
"""Host memory of a worker process before any model: Python, torch and transformers took 0.4 to 0.6 GiB where it was measured."""


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
        """Make the pools of these roles (None means all that are mapped) and find a node for every process.

        `nodes` is what there is to place them on; None means the Ray cluster this process is connected to, or else this machine.
        `memory` is the host memory in bytes that a process of each pool needs beside PROCESS_MEMORY. Raises ResourceError, with what is
        short in numbers, before anything is started.
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
        """The pool of a role; create_resource_pool comes first."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Processes in all pools."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())
