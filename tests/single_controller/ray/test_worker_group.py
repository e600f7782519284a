import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.groups import TIMEOUTS
from helpers.processes import are_gone

from lockstep.errors import ConfigError, ResourceError, WorkerDied, WorkerError, WorkerTimeout
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base import ClassWithInitArgs, Dispatch, ResourcePool, Worker, register
from lockstep.single_controller.ray import RayWorkerGroup

ray = pytest.importorskip("ray")
# Worker processes cannot import test files, so the classes below travel with the call.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class Actor(Worker):
    def __init__(self, scale: int = 1) -> None:
        self.scale = scale
        self.place = (self.rank, self.world_size, self.local_rank, str(self.device))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def about(self) -> tuple[Any, ...]:
        return (*self.place, os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, data: DataProto, n: int) -> DataProto:
        rows = data.repeat(n)
        rows.set("rank", torch.full((len(rows),), self.rank))
        return rows

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def reduce(self, value: float) -> float:
        total = torch.tensor(value * self.scale)
        dist.all_reduce(total)
        return total.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ArithmeticError("loss is not finite")
        dist.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(0.5)  # so that the peer waits in the collective
            os._exit(3)
        dist.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sleep_on(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(60)


def make(world_size: int, **kwargs: Any) -> RayWorkerGroup:
    return RayWorkerGroup(ResourcePool([world_size]), ClassWithInitArgs(Actor, scale=2), **TIMEOUTS | kwargs)


@pytest.fixture(scope="module")
def pair(ray_cluster: None):
    """Two ranks, for tests that do not break them."""
    with make(2) as group:
        yield group


def pids_of(group: RayWorkerGroup) -> list[int]:
    return [about[4] for about in group.about()]


def test_ranks_know_their_place_and_share_the_cpus(pair: RayWorkerGroup) -> None:
    about = pair.about()
    assert [a[:4] for a in about] == [(0, 2, 0, "cpu"), (1, 2, 1, "cpu")]
    assert len({a[4] for a in about} | {os.getpid()}) == 3
    assert {a[6] for a in about} == {"4"}  # 8 CPUs for 2 processes
    assert {a[5] for a in about} == {min(4, os.cpu_count() or 1)}


def test_a_collective_runs_across_the_ranks(pair: RayWorkerGroup) -> None:
    assert pair.reduce([1.0, 2.0]) == [6.0, 6.0]


def test_rows_are_shared_out_and_come_back_in_order(pair: RayWorkerGroup) -> None:
    prompts = Ragged.from_rows([[i] * (1 + i % 4) for i in range(7)])
    data = DataProto.from_dict({"prompts": prompts}, {"uid": [f"u{i}" for i in range(7)]}, {"pad_token_id": 9})
    result = pair.generate(data, n=2)
    assert result.ragged("prompts").equal(data.repeat(2).ragged("prompts"))
    assert result.non_tensor_batch["uid"].tolist() == data.repeat(2).non_tensor_batch["uid"].tolist()
    assert set(result.batch["rank"].tolist()) == {0, 1}
    assert len(pair.generate(data[:1], n=1)) == 1  # one rank has no rows


def test_by_name_and_without_blocking(pair: RayWorkerGroup) -> None:
    assert pair.execute_all("echo", 1) == [1, 1]
    assert pair.execute_rank_zero("echo", value=2) == 2
    future = pair.sleep(2.0)
    assert not future.done()
    assert future.get() == [2.0, 2.0]
    assert future.done()
    assert future.get() == [2.0, 2.0]


def test_arguments_that_cannot_be_sent_leave_the_group_as_it_was(pair: RayWorkerGroup) -> None:
    with pytest.raises(TypeError, match=r"serialize|pickle"):
        pair.echo(sys._getframe())
    assert pair.reduce([1.0, 1.0]) == [4.0, 4.0]


def test_a_long_wait_says_who_is_still_out(
    pair: RayWorkerGroup, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "heartbeat_s", 0.2)
    pair.sleep(2.0).get()
    assert re.search(r"lockstep: Actor.sleep: waited \d s, still out: rank\(s\) \[0, 1\]", capfd.readouterr().err)


def test_one_rank_with_two_roles_in_one_process_and_none_left_after_closing() -> None:
    roles = {"actor": ClassWithInitArgs(Actor), "critic": ClassWithInitArgs(Actor, scale=5)}
    group = RayWorkerGroup(ResourcePool([1]), roles, **TIMEOUTS)
    views = group.spawn()
    pids = pids_of(views["actor"])
    assert pids == pids_of(views["critic"])
    assert views["actor"].reduce([1.0]) == [1.0]
    assert views["critic"].reduce([1.0]) == [5.0]
    group.close()
    assert are_gone(pids)
    with pytest.raises(WorkerDied, match="was closed"):
        views["actor"].about()


def check_broken(group: RayWorkerGroup, pids: list[int], error: WorkerError) -> None:
    """Further calls raise the first error at once, and no process is left."""
    start = time.monotonic()
    with pytest.raises(type(error)) as again:
        group.echo(1)
    assert again.value is error
    assert time.monotonic() - start < 1
    assert are_gone(pids)
    group.close()


def test_workers_end_when_the_closing_of_their_group_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make(1)
    group.spawn()
    pids = pids_of(group)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ray, "wait", interrupt)
        group.close()
    assert are_gone(pids, within_s=60.0)


def test_a_call_that_was_interrupted_when_some_ranks_had_it_ends_the_group() -> None:
    group = make(2)
    group.spawn()
    pids = pids_of(group)

    class Interrupted:
        """In the place of rank 1's actor."""

        @property
        def call(self) -> None:
            group._actors[1] = second
            raise KeyboardInterrupt

    second, group._actors[1] = group._actors[1], Interrupted()
    with pytest.raises(KeyboardInterrupt):
        group.reduce([1.0, 1.0])
    with pytest.raises(WorkerDied, match=r"Actor\.reduce had reached some of them") as caught:
        group.echo(1)
    check_broken(group, pids, caught.value)


def test_a_worker_that_raises_ends_the_wait_of_its_peers_with_its_own_traceback() -> None:
    group = make(2)
    group.spawn()
    pids, start = pids_of(group), time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.fail_on(1)
    assert time.monotonic() - start < 10
    assert type(caught.value) is WorkerError
    assert caught.value.worker.startswith(f"Actor rank 1 (pid {pids[1]}, node ")
    assert 'raise ArithmeticError("loss is not finite")' in caught.value.detail
    check_broken(group, pids, caught.value)


def test_a_worker_that_dies_is_named_while_its_peer_waits_in_a_collective() -> None:
    group = make(2)
    group.spawn()
    pids, start = pids_of(group), time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        group.die_on(1)
    assert time.monotonic() - start < 10
    assert caught.value.worker.startswith(f"Actor rank 1 (pid {pids[1]}, node ")
    assert "during Actor.die_on" in caught.value.detail
    check_broken(group, pids, caught.value)


def test_a_worker_past_the_deadline_is_named_and_calls_that_wait_behind_it_fail_with_it() -> None:
    group = make(2, timeout_s=5.0)
    group.spawn()
    pids = pids_of(group)
    stuck, behind = group.sleep_on(1), group.sleep(0.0)
    with pytest.raises(WorkerTimeout) as caught:
        stuck.get()
    assert caught.value.worker.startswith(f"Actor rank 1 (pid {pids[1]}, node ")
    assert "Actor.sleep_on was still out on rank(s) [1]" in caught.value.detail
    with pytest.raises(WorkerTimeout) as also:
        behind.get()
    assert also.value is caught.value
    check_broken(group, pids, caught.value)


def test_a_constructor_that_fails_is_a_worker_error_with_its_traceback() -> None:
    class Broken(Worker):
        def __init__(self) -> None:
            raise LookupError("no such model folder")

    group = RayWorkerGroup(ResourcePool([1]), {"critic": ClassWithInitArgs(Broken)}, **TIMEOUTS)
    with pytest.raises(WorkerError, match=r"(?s)critic rank 0.*no such model folder") as caught:
        group.spawn()
    with pytest.raises(WorkerError) as again:
        group.spawn()
    assert again.value is caught.value


def test_start_up_has_a_deadline() -> None:
    class Slow(Worker):
        def __init__(self) -> None:
            time.sleep(60)

    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"Slow rank 0.*still out on rank\(s\) \[0\]"):
        RayWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Slow), timeout_s=300.0, start_timeout_s=4.0).spawn()
    assert time.monotonic() - start < 15


def test_too_many_processes_are_a_resource_error_with_numbers() -> None:
    with pytest.raises(ResourceError, match=r"\[99\] needs 99 CPUs.*on 1 node"):
        make(99).spawn()


def test_a_placement_must_name_live_nodes_and_cuda_needs_gpus() -> None:
    with pytest.raises(ResourceError, match="not alive in this cluster: \\['nowhere'\\]"):
        make(1, placement=["nowhere"]).spawn()
    with pytest.raises(ConfigError, match="names 1 nodes, but pool 'pool' has 2 processes"):
        make(2, placement=["nowhere"])
    with pytest.raises(ConfigError, match="use_gpu=False"):
        make(1, device="cuda")


def in_subprocess(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True).stdout


LAZY = """
import sys
from lockstep.errors import MissingExtra, ResourceError
from lockstep.single_controller.base import ClassWithInitArgs, ResourcePool
from lockstep.single_controller.ray import RayWorkerGroup, connect
assert "ray" not in sys.modules
timeouts = {"timeout_s": 9.0, "start_timeout_s": 9.0}

sys.modules["ray"] = None
for use in (lambda: RayWorkerGroup(ResourcePool([1]), ClassWithInitArgs(object), **timeouts), RayWorkerGroup.nodes, connect):
    try:
        use()
    except MissingExtra as error:
        assert "lockstep-rl[ray]" in str(error)
    else:
        raise AssertionError(use)

del sys.modules["ray"]
try:
    RayWorkerGroup(ResourcePool([1]), ClassWithInitArgs(object), **timeouts).spawn()
except ResourceError as error:
    assert "ray.init()" in str(error)
print("ok")
"""


def test_importing_needs_no_ray_and_using_says_what_is_missing() -> None:
    assert in_subprocess(LAZY) == "ok\n"
