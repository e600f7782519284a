"""The program on a Ray cluster of three nodes (of this machine), with a third of the batch on each."""

import json
import subprocess
import sys

import pytest
from helpers.run import STEPS, assert_same_training, read_metrics

from lockstep.config.load import to_yaml

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SCRIPT = """
import json
import sys

from ray._private.state import actors
from ray.cluster_utils import Cluster

from lockstep.single_controller.ray import connect, disconnect
from lockstep.trainer.main_ppo import main

cluster = Cluster()
for _ in range(3):
    cluster.add_node(num_cpus=1, object_store_memory=80 * 1024**2)
assert connect(address=cluster.address, runtime_env=json.loads(sys.argv.pop(1)))
assert main([*sys.argv[1:], "trainer.nnodes=3"]) == 0
nodes = [actor["Address"]["NodeID"] for actor in actors().values()]
assert len(nodes) == len(set(nodes)) == 3, nodes
# A fourth node is not there, and the message says so in numbers.
assert main([*sys.argv[1:], "trainer.nnodes=4"]) == 1
disconnect()
cluster.shutdown()
"""


def test_three_nodes_train_like_one_process(embedded_config, three_steps, warm_ray, tmp_path):
    config = embedded_config(*STEPS, "trainer.resume_mode=disable")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-c", SCRIPT, json.dumps(warm_ray), "--config", str(tmp_path / "config.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "on 3 CPU processes" in run.stdout
    assert_same_training(read_metrics(config), three_steps)
    message = run.stderr[run.stderr.rindex("error: ") :]
    assert "4 node" in message
    assert "trainer.nnodes" in message
