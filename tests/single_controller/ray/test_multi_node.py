"""A cluster of three (simulated) nodes. In a process of its own, so that it does not meet the session's Ray."""

import subprocess
import sys

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

SCRIPT = """
import os

import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster

from lockstep.errors import ResourceError
from lockstep.single_controller.base import ClassWithInitArgs, Dispatch, ResourcePool, Worker, place, register
from lockstep.single_controller.ray import RayWorkerGroup, connect, disconnect


class Summing(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self):
        import ray

        x = torch.tensor(self.rank + 1.0)
        dist.all_reduce(x)
        return x.item(), ray.get_runtime_context().get_node_id(), self.local_rank


cluster = Cluster()
for _ in range(3):
    cluster.add_node(num_cpus=2, object_store_memory=80 * 1024**2)
assert connect(address=cluster.address)

nodes = RayWorkerGroup.nodes()
assert len(nodes) == 3, nodes
placement = place([ResourcePool([1, 1, 1])], nodes)["pool"]
with RayWorkerGroup(ResourcePool([1, 1, 1]), ClassWithInitArgs(Summing), placement=placement) as group:
    answers = group.total()
assert [node for _, node, _ in answers] == placement, (answers, placement)
assert len(set(placement)) == 3
assert [total for total, _, _ in answers] == [6.0] * 3
assert [local_rank for _, _, local_rank in answers] == [0, 0, 0]

try:
    RayWorkerGroup(ResourcePool([1, 1, 1, 1]), ClassWithInitArgs(Summing)).spawn()
except ResourceError as error:
    print(error)
disconnect()
cluster.shutdown()
"""


def test_workers_on_three_nodes_meet_and_a_fourth_node_is_missing_in_numbers() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "pool 'pool' [1, 1, 1, 1] needs 4 CPUs, 0 GPUs, 0.0 GiB on 4 node(s)" in run.stdout
    assert "short: 1 node(s)" in run.stdout
