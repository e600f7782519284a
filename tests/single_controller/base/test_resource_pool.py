import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError, ResourceError
from lockstep.single_controller.base.resource_pool import NodeResources, ResourcePool, place

GIB = 1024**3


def test_ranks_of_a_pool() -> None:
    pool = ResourcePool([2, 1], name="global")
    assert (pool.world_size, pool.store) == (3, [2, 1])


@pytest.mark.parametrize("processes", [[], [2, 0], [-1]])
def test_a_pool_without_processes_is_refused(processes: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.n_gpus_per_node"):
        ResourcePool(processes)


def fits(pools: list[ResourcePool], nodes: list[NodeResources], placement: dict[str, list[str]]) -> bool:
    """Whether a placement keeps the rules."""
    used: dict[str, Counter[str]] = {node.name: Counter() for node in nodes}
    for pool in pools:
        ranks = iter(placement[pool.name])
        entry_nodes = []
        for count in pool.store:
            where = {next(ranks) for _ in range(count)}
            if len(where) != 1:
                return False
            entry_nodes.append(where.pop())
            used[entry_nodes[-1]].update(
                cpus=count * pool.cpus_per_process, gpus=count * pool.use_gpu, memory=count * pool.memory_per_process
            )
        if len(set(entry_nodes)) < len(entry_nodes) or next(ranks, None) is not None:
            return False
    return all(used[node.name][kind] <= getattr(node, kind) for node in nodes for kind in ("cpus", "gpus", "memory"))


def exists(pools: list[ResourcePool], nodes: list[NodeResources]) -> bool:
    """Whether any placement keeps the rules, by trying all."""
    entries = [(pool.name, count) for pool in pools for count in pool.store]
    for choice in itertools.product([node.name for node in nodes], repeat=len(entries)):
        placement: dict[str, list[str]] = {pool.name: [] for pool in pools}
        for (name, count), node in zip(entries, choice, strict=True):
            placement[name] += [node] * count
        if fits(pools, nodes, placement):
            return True
    return False


small = st.integers(0, 4)
some_nodes = st.lists(st.tuples(small, small, small), max_size=3).map(
    lambda rooms: [NodeResources(f"n{i}", *room) for i, room in enumerate(rooms)]
)
some_pools = st.lists(
    st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=3), st.booleans(), st.integers(0, 2), st.integers(0, 2)),
    max_size=3,
).map(lambda pools: [ResourcePool(s, f"p{i}", g, c, m) for i, (s, g, c, m) in enumerate(pools)])


@settings(max_examples=150, deadline=None)
@given(some_pools, some_nodes)
def test_a_placement_is_found_exactly_when_one_exists(pools: list[ResourcePool], nodes: list[NodeResources]) -> None:
    if sum(len(pool.store) for pool in pools) > 6:
        return
    try:
        placement = place(pools, nodes)
    except ResourceError:
        assert not exists(pools, nodes)
    else:
        assert fits(pools, nodes, placement)


def test_ranks_follow_the_entries_of_the_pool() -> None:
    nodes = [NodeResources("small", 1, 0, 0), NodeResources("large", 4, 0, 0)]
    assert place([ResourcePool([1, 3])], nodes) == {"pool": ["small", "large", "large", "large"]}


def test_pools_share_nodes_while_these_last() -> None:
    nodes = [NodeResources("a", 16, 8, 64 * GIB), NodeResources("b", 16, 8, 64 * GIB)]
    pools = [
        ResourcePool([4, 4], "actor", use_gpu=True),
        ResourcePool([4, 4], "critic", use_gpu=True),
        ResourcePool([8], "reward", memory_per_process=8 * GIB),
    ]
    assert fits(pools, nodes, place(pools, nodes))


def test_a_large_full_cluster_is_placed() -> None:
    nodes = [NodeResources(f"n{i:02}", 8, 8, 0) for i in range(64)]
    pools = [ResourcePool([8] * 32, "a", True), ResourcePool([4] * 32, "b", True), ResourcePool([4] * 32, "c", True)]
    assert fits(pools, nodes, place(pools, nodes))


def test_what_is_short_is_said_in_numbers_per_pool_and_in_total() -> None:
    nodes = [NodeResources("a", 8, 4, 32 * GIB)]
    with pytest.raises(ResourceError) as caught:
        place([ResourcePool([8, 8], "global_pool", use_gpu=True, memory_per_process=GIB), ResourcePool([1], "rm")], nodes)
    text = str(caught.value)
    assert "pool 'global_pool' [8, 8] needs 16 CPUs, 16 GPUs, 16.0 GiB on 2 node(s)" in text
    assert "pool 'rm' [1] needs 1 CPUs, 0 GPUs, 0.0 GiB on 1 node(s)" in text
    assert "needed in total: 17 CPUs, 16 GPUs, 16.0 GiB on 2 node(s)" in text
    assert "available in total: 8 CPUs, 4 GPUs, 32.0 GiB on 1 node(s)" in text
    assert "short: 9 CPUs, 12 GPUs, 1 node(s)" in text
    assert "trainer.n_gpus_per_node" in text
    assert "trainer.nnodes" in text


def test_enough_in_total_but_not_on_one_node_is_said() -> None:
    with pytest.raises(ResourceError, match="the totals suffice, but"):
        place([ResourcePool([4])], [NodeResources("a", 2, 0, 0), NodeResources("b", 2, 0, 0)])


def test_two_pools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="different names"):
        place([ResourcePool([1]), ResourcePool([1])], [NodeResources("a", 2, 0, 0)])
