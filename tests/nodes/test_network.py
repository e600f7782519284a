"""A Ray cluster of three nodes, each in a network namespace of its own (`make test-nodes`): one is killed, cut off, or behind a slow
network. Each is named within half a minute, and with trainer.max_restarts the run goes on without it.

Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.program import PROGRAM, arguments, num_steps, wait_until

NAMED_WITHIN_S = 30.0
NODES = 3
PORT = 6379
REPOSITORY = Path(__file__).parents[2]


def tool(*words: object) -> str:
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True).stdout


class Cluster:
    """Namespaces on one bridge, a Ray node in each; the first has the head."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        number = os.getpid() % 250
        self.bridge = f"lkbr{number}"
        self.names = [f"lk{number}n{i}" for i in range(NODES)]
        self.addresses = [f"10.{number}.77.{i + 1}" for i in range(NODES)]
        # gloo looks for the interface of the host's name, which no namespace knows.
        # Ray's nodes would ask each other for a token that nobody has made.
        own = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
        self.environment = os.environ | own

    def make(self) -> None:
        tool("ip", "link", "add", self.bridge, "type", "bridge")
        tool("ip", "link", "set", self.bridge, "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            tool("ip", "netns", "add", name)
            tool("ip", "link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            tool("ip", "link", "set", f"{name}v", "master", self.bridge, "up")
            tool("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                tool("ip", "-n", name, "link", "set", device, "up")
            where = (
                ["--head", f"--port={PORT}", "--include-dashboard=false"] if i == 0 else [f"--address={self.addresses[0]}:{PORT}"]
            )
            ray = [str(Path(sys.executable).with_name("ray")), "start", *where, f"--node-ip-address={address}", "--num-cpus=1"]
            done = self.run(i, [*ray, "--object-store-memory=80000000", "--disable-usage-stats"])
            assert done.returncode == 0, done.stdout + done.stderr

    def inside(self, node: int, command: list[str]) -> list[str]:
        """The command on a node, which has a host name of its own."""
        name = self.names[node]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh", *command]

    def run(self, node: int, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.inside(node, command), env=self.environment, capture_output=True, text=True, timeout=240)

    def workers(self, node: int) -> list[int]:
        """The processes of a run on a node."""
        return [pid for pid in self.processes(node) if "ray::WorkerHost" in command_of(pid)]

    def processes(self, node: int) -> list[int]:
        return [int(pid) for pid in tool("ip", "netns", "pids", self.names[node]).split()]

    def kill(self, node: int) -> None:
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut_off(self, node: int) -> None:
        tool("ip", "link", "set", f"{self.names[node]}v", "down")

    def slow_down(self, node: int) -> None:
        """A delay, where the kernel has it; else a line of two kilobits per second."""
        device = ["tc", "-n", self.names[node], "qdisc", "add", "dev", "eth0", "root"]
        if subprocess.run([*device, "netem", "delay", "2500ms"], capture_output=True).returncode:
            tool(*device, "tbf", "rate", "2kbit", "burst", "2000", "latency", "3s")

    def close(self) -> None:
        for node, name in enumerate(self.names):
            with contextlib.suppress(subprocess.CalledProcessError):
                self.kill(node)
                tool("ip", "netns", "delete", name)
            with contextlib.suppress(subprocess.CalledProcessError):  # its other end may live as long as a process inside
                tool("ip", "link", "delete", f"{name}v")
        with contextlib.suppress(subprocess.CalledProcessError):
            tool("ip", "link", "delete", self.bridge)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def why_not() -> str | None:
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} (iproute2) not installed"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        tool("ip", "netns", "add", "lkprobe")
        tool("ip", "netns", "delete", "lkprobe")
        return None
    return "network namespaces cannot be made here: needs root and CAP_NET_ADMIN"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    made = Cluster(tmp_path)
    try:
        made.make()
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def training(cluster: Cluster, config, *more: str) -> Iterator[tuple[Path, subprocess.Popen]]:
    """A run in the first node, once it has done a step; its output, and its process."""
    command = [
        *PROGRAM, *arguments(config), "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.save_freq=1",
        "trainer.total_training_steps=100000", "trainer.val_before_train=false", "trainer.test_freq=0", "trainer.max_ckpt_to_keep=1",
        f"ray_kwargs.ray_init.address={cluster.addresses[0]}:{PORT}", *more,
    ]  # fmt: skip
    log = cluster.folder / "log"
    with log.open("w") as out:
        driver = subprocess.Popen(cluster.inside(0, command), env=cluster.environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: num_steps(config) >= 1, 240, driver, log)
        assert driver.poll() is None, log.read_text()[-4000:]
        yield log, driver
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.parametrize("what", ["kill", "cut_off", "slow_down"])
def test_a_node_that_is_lost_is_named(cluster: Cluster, embedded_config, what: str) -> None:
    with training(cluster, embedded_config(), "trainer.nnodes=3") as (log, driver):
        before, hit_at = len(log.read_text()), time.monotonic()
        getattr(cluster, what)(2)

        def told() -> str:
            lines = log.read_text()[before:].splitlines()
            named = (cluster.addresses[2], f"node {cluster.names[2]}")
            return "\n".join(
                line for line in lines if any(n in line for n in named) and ("error:" in line or "lockstep: warning" in line)
            )

        wait_until(told, NAMED_WITHIN_S + 10, driver, log)
        took = time.monotonic() - hit_at
        assert told(), log.read_text()[before:][-4000:]
        assert took < NAMED_WITHIN_S
        print(f"{what}: named after {took:.1f} s: {told()[:300]}")


def test_a_run_goes_on_without_a_node_that_is_cut_off(cluster: Cluster, embedded_config) -> None:
    config = embedded_config()
    with training(cluster, config, "trainer.nnodes=2", "trainer.max_restarts=1") as (log, driver):
        lost = next(node for node in (1, 2) if cluster.workers(node))
        hit_at = time.monotonic()
        cluster.cut_off(lost)
        wait_until(lambda: "restart 1 of at most 1" in log.read_text(), NAMED_WITHIN_S + 10, driver, log)
        assert time.monotonic() - hit_at < NAMED_WITHIN_S, log.read_text()[-4000:]
        assert any(name in log.read_text() for name in (cluster.addresses[lost], f"node {cluster.names[lost]}"))
        done = num_steps(config)
        wait_until(lambda: num_steps(config) >= done + 2, 240, driver, log)
        assert driver.poll() is None, log.read_text()[-4000:]
