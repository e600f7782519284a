"""The program on a Ray cluster of three nodes (of this machine), with a third of the batch on each."""

import json
import subprocess
import sys

import pytest
from helpers.run import roles, train

pytestmark = pytest.mark.ray

SCRIPT = """
import sys

from ray.cluster_utils import Cluster

from lockstep.trainer.main_ppo import main

cluster = Cluster()
for _ in range(3):
    cluster.add_node(num_cpus=2, object_store_memory=80 * 1024**2)
assert main([*sys.argv[1:], f"ray_kwargs.ray_init.address={cluster.address}", "trainer.nnodes=3"]) == 0
# A fourth node is not there, and the message says so in numbers.
assert main([*sys.argv[1:], f"ray_kwargs.ray_init.address={cluster.address}", "trainer.nnodes=4"]) == 1
cluster.shutdown()
"""


def test_three_nodes_train_like_one_process(embedded_config, tmp_path):
    config = embedded_config("trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.resume_mode=disable")
    expected = train(config, {"global_pool": [1]}, roles("ActorRollout", "Critic", "RefPolicy"))
    (config.trainer.run_dir / "metrics.jsonl").unlink()
    command = [sys.executable, "-c", SCRIPT, "--config", str(config.trainer.run_dir / "config.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "on 3 CPU processes" in run.stdout
    rows = [json.loads(line) for line in (config.trainer.run_dir / "metrics.jsonl").read_text().splitlines()]
    for name in ("critic/score/mean", "actor/grad_norm", "critic/vf_loss", "response_length/mean"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in expected], rel=1e-4), name
    message = run.stderr[run.stderr.rindex("error: ") :]
    assert "4 node" in message
    assert "trainer.nnodes" in message
