"""Resource pools: how many processes on how many nodes, and on which nodes of a cluster they fit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from lockstep.errors import ConfigError, ResourceError

_GIB = 1024**3
_SLACK = 1e-6  # CPUs are counted in fractions
_MAX_TRIES = 50_000  # placements of one entry; far more than realistic clusters need, and well under a second


class ResourcePool:
    """Processes on nodes: `[8, 8]` is 8 processes on each of two nodes. With `use_gpu` every process has a GPU of its
    own.

    Raises ConfigError when there are no processes.
    """

    def __init__(
        self,
        process_on_nodes: list[int],
        name: str = "pool",
        use_gpu: bool = False,
        cpus_per_process: float = 1.0,
        memory_per_process: int = 0,
    ) -> None:
        if not process_on_nodes or any(count < 1 for count in process_on_nodes):
            raise ConfigError(
                f"pool {name!r} needs at least one process on each of its nodes, got {process_on_nodes}; "
                "see trainer.n_gpus_per_node and trainer.nnodes"
            )
        self.store = list(process_on_nodes)
        self.name = name
        self.use_gpu = use_gpu
        self.cpus_per_process = cpus_per_process
        self.memory_per_process = memory_per_process
        self.world_size = sum(process_on_nodes)
        """Number of processes."""

    def needs(self, num_processes: int) -> _Amount:
        """What that many processes of this pool take."""
        each = float(self.use_gpu), float(self.memory_per_process), self.cpus_per_process
        return _Amount(*(num_processes * amount for amount in each))


@dataclass(frozen=True)
class NodeResources:
    """What a node has free."""

    name: str
    cpus: float
    gpus: float
    memory: float
    """Bytes."""

    @property
    def free(self) -> _Amount:
        """The same without the name."""
        return _Amount(self.gpus, self.memory, self.cpus)


class _Amount(NamedTuple):
    gpus: float
    memory: float
    cpus: float

    def plus(self, other: _Amount, sign: int = 1) -> _Amount:
        return _Amount(*(a + sign * b for a, b in zip(self, other, strict=True)))

    def fits(self, room: _Amount) -> bool:
        return min(room.plus(self, -1)) >= -_SLACK

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs, {self.gpus:g} GPUs, {self.memory / _GIB:.1f} GiB"


def place(pools: Sequence[ResourcePool], nodes: Sequence[NodeResources]) -> dict[str, list[str]]:
    """Choose a node for every process: pool name -> node name of each rank.

    The processes of one entry of a pool share a node, and each entry has a node that no other entry of its pool has.
    Pools may share a node while its CPUs, GPUs and memory last. The search backs out of dead ends, so a placement that
    exists is found unless the search exceeds a bound that only very large and very tight cases reach. Raises
    ConfigError when two pools have one name, ResourceError with the numbers when there is no placement.
    """
    names = [pool.name for pool in pools]
    if len(set(names)) < len(names):
        raise ConfigError(f"resource pools must have different names, got {names}")
    chosen = _search(pools, nodes)
    if chosen is None:
        raise ResourceError(_what_is_short(pools, nodes))
    return {
        pool.name: [nodes[chosen[p, e]].name for e, count in enumerate(pool.store) for _ in range(count)]
        for p, pool in enumerate(pools)
    }


Entry = tuple[int, int]
"""Pool, and position in its `process_on_nodes`."""


def _search(pools: Sequence[ResourcePool], nodes: Sequence[NodeResources]) -> dict[Entry, int] | None:
    """The node of every entry, or None: depth first, the hardest entries first, each on the fullest node that takes
    it."""
    needs = {(p, e): pool.needs(count) for p, pool in enumerate(pools) for e, count in enumerate(pool.store)}
    # Stable, so that equal entries keep their order and early ranks get early nodes.
    entries = sorted(needs, key=lambda entry: needs[entry], reverse=True)
    tries = itertools.count()

    def settle(depth: int, state: list[tuple[_Amount, frozenset[int]]]) -> dict[Entry, int] | None:
        """The nodes of the entries from `depth` on; `state` is the room of each node, and the pools that have an entry there."""
        if depth == len(entries):
            return {}
        entry = entries[depth]
        need = needs[entry]
        pool = frozenset({entry[0]})
        # Nodes with the same room that hold the same pools are interchangeable: one failure speaks for all.
        failed: set[tuple[_Amount, frozenset[int]]] = set()
        for n, (room, held) in sorted(enumerate(state), key=lambda item: item[1][0]):
            if pool <= held or not need.fits(room) or (room, held) in failed or next(tries) >= _MAX_TRIES:
                continue
            rest = settle(depth + 1, [*state[:n], (room.plus(need, -1), held | pool), *state[n + 1 :]])
            if rest is not None:
                return rest | {entry: n}
            failed.add((room, held))
        return None

    return settle(0, [(node.free, frozenset()) for node in nodes])


def _what_is_short(pools: Sequence[ResourcePool], nodes: Sequence[NodeResources]) -> str:
    needs = [pool.needs(pool.world_size) for pool in pools]
    total, free = (reduce(_Amount.plus, amounts, _Amount(0.0, 0.0, 0.0)) for amounts in (needs, [node.free for node in nodes]))
    most_nodes = max((len(pool.store) for pool in pools), default=0)
    missing = total.plus(free, -1)
    short = {
        f"{missing.cpus:g} CPUs": missing.cpus,
        f"{missing.gpus:g} GPUs": missing.gpus,
        f"{missing.memory / _GIB:.1f} GiB": missing.memory,
        f"{most_nodes - len(nodes)} node(s)": most_nodes - len(nodes),
    }
    lacking = ", ".join(text for text, amount in short.items() if amount > _SLACK)
    return "\n".join(
        [
            "the resource pools do not fit on the nodes there are:",
            *(f"  pool {p.name!r} {p.store} needs {need} on {len(p.store)} node(s)" for p, need in zip(pools, needs, strict=True)),
            *(f"  node {node.name!r} has {node.free} free" for node in nodes),
            f"  needed in total: {total} on {most_nodes} node(s)",
            f"  available in total: {free} on {len(nodes)} node(s)",
            f"  short: {lacking}"
            if lacking
            else "  the totals suffice, but no way was found to give each entry of a pool enough room on a node of its own",
            "Lower trainer.n_gpus_per_node or trainer.nnodes, or use a bigger machine or cluster.",
        ]
    )
