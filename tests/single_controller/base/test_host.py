import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.groups import TIMEOUTS

from lockstep.errors import ConfigError, ResourceError, WorkerError
from lockstep.single_controller.base.host import WorkerHost
from lockstep.single_controller.base.worker import ClassWithInitArgs, Worker, WorkerEnvironment


class Faulty(Worker):
    def divide(self, a: int, b: int) -> float:
        return a / b

    def misconfigured(self) -> None:
        raise ConfigError("actor.lr must be positive, got -1")


@pytest.fixture
def host():
    host = WorkerHost()
    host.setup(WorkerEnvironment(name="critic"), **TIMEOUTS)
    host.create("critic", ClassWithInitArgs(Faulty))
    yield host
    host.close()


def test_an_exception_becomes_a_picklable_worker_error_with_the_workers_traceback(host: WorkerHost) -> None:
    with pytest.raises(WorkerError) as caught:
        host.call("critic", "divide", ((1,), {"b": 0}))
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.worker.startswith(f"critic rank 0 (pid {os.getpid()}, node ")
    assert "return a / b" in error.detail
    assert "ZeroDivisionError" in error.detail


def test_an_error_that_is_the_users_to_fix_says_its_message_first(host: WorkerHost) -> None:
    with pytest.raises(WorkerError) as caught:
        host.call("critic", "misconfigured", ((), {}))
    assert caught.value.detail.startswith("ConfigError: actor.lr must be positive, got -1\n")
    assert "in misconfigured" in caught.value.detail


def test_hosts_share_one_process_group_and_the_last_to_close_destroys_it(host: WorkerHost) -> None:
    second = WorkerHost()
    second.setup(WorkerEnvironment(), **TIMEOUTS)
    host.close()
    assert dist.is_initialized()
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [1, 1]
    second.close()
    second.close()
    assert not dist.is_initialized()


def test_a_process_group_made_by_someone_else_is_used_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        host = WorkerHost()
        host.setup(WorkerEnvironment(), **TIMEOUTS)
        host.close()
        assert dist.is_initialized()
        with pytest.raises(ResourceError, match=r"rank 1 of 2, but torch\.distributed in this process is already rank 0 of 1"):
            WorkerHost().setup(WorkerEnvironment(rank=1, world_size=2), **TIMEOUTS)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_a_resource_error() -> None:
    with pytest.raises(ResourceError, match=r"cuda.*sees no GPU"):
        WorkerHost().setup(WorkerEnvironment(device=torch.device("cuda")), **TIMEOUTS)


STUCK = """
import time
from lockstep.single_controller.base.host import WorkerHost
from lockstep.single_controller.base.worker import ClassWithInitArgs

class Stuck:
    def finish_at_once(self):
        pass

    def wait_for_godot(self):
        time.sleep(0.8)

host = WorkerHost()
host.create("actor", ClassWithInitArgs(Stuck))
host.call("actor", "finish_at_once", ((), {}), 0.3)
time.sleep(0.5)
host.call("actor", "wait_for_godot", ((), {}), 0.3)
"""


def test_a_stuck_worker_prints_its_stacks_and_a_finished_one_does_not() -> None:
    run = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=240, check=True)
    assert run.stderr.count("Timeout (") == 1
    assert "in wait_for_godot" in run.stderr
