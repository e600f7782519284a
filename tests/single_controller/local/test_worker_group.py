import asyncio
import sys
import threading
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.groups import TIMEOUTS

from lockstep.errors import ConfigError, WorkerDied
from lockstep.protocol import DataProto
from lockstep.single_controller.base import ClassWithInitArgs, Dispatch, Execute, ResourcePool, Worker, place, register
from lockstep.single_controller.local import LocalWorkerGroup


class Actor(Worker):
    def __init__(self, scale: int = 1) -> None:
        self.scale = scale

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto) -> DataProto:
        """Scale the rows."""
        return DataProto.from_dict({"score": data.batch["row"] * self.scale})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def saved(self, path: str) -> str:
        return f"{path}/{self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def waiting(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def later(self) -> int:
        return self.world_size

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def fail(self) -> None:
        raise KeyError("the actor's own line")

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def where(self) -> tuple[int, int]:
        return id(self), threading.get_ident()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def callers(self, count: int) -> list[str]:
        return [frame.name for frame in reversed(traceback.extract_stack()[:-1])][:count]

    def helper(self, a: int) -> int:
        return a + self.scale


@pytest.fixture
def group():
    with LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Actor, scale=3), **TIMEOUTS) as group:
        yield group


def test_registered_methods_are_methods_of_the_group(group: LocalWorkerGroup) -> None:
    data = DataProto.from_dict({"row": torch.arange(3)})
    assert group.score(data).batch["score"].tolist() == [0, 3, 6]
    assert group.spawn()["Actor"].score(data).batch["score"].tolist() == [0, 3, 6]
    assert group.score.__doc__ == "Scale the rows."
    assert group.saved("ckpt") == "ckpt/0"
    assert group.world_size == 1


def test_arguments_are_passed_by_reference_and_calls_stay_in_this_thread(group: LocalWorkerGroup) -> None:
    value = object()
    assert group.echo(value)[0] is value
    assert group.where()[1] == threading.get_ident()


def test_between_the_caller_and_the_workers_method_is_one_frame(group: LocalWorkerGroup) -> None:
    assert group.callers(2)[1] == "test_between_the_caller_and_the_workers_method_is_one_frame"


def test_an_async_method_is_awaited(group: LocalWorkerGroup) -> None:
    assert group.waiting(3) == [3]


def test_a_call_that_does_not_block_gives_a_future(group: LocalWorkerGroup) -> None:
    future = group.later()
    assert future.done()
    assert future.get() == future.get(timeout_s=0.0) == 1


def test_any_method_can_be_executed_by_name(group: LocalWorkerGroup) -> None:
    assert group.execute_all("helper", 1) == [4]
    assert group.execute_rank_zero("helper", a=2) == 5


def test_an_unregistered_method_is_an_attribute_error_that_lists_the_registered_ones(group: LocalWorkerGroup) -> None:
    with pytest.raises(
        AttributeError, match=r"no registered method 'helper'.*'callers', 'echo', 'fail', 'later', 'saved', 'score'"
    ):
        group.helper(1)


def test_a_workers_exception_is_raised_as_itself_with_its_line_and_the_group_goes_on(group: LocalWorkerGroup) -> None:
    with pytest.raises(KeyError) as caught:
        group.fail()
    assert traceback.extract_tb(caught.tb)[-1].name == "fail"
    assert group.echo(1) == [1]


def test_roles_are_separate_workers_in_one_group_and_groups_share_the_process_group() -> None:
    classes = {"actor": ClassWithInitArgs(Actor, 1), "ref": ClassWithInitArgs(Actor, 2)}
    with LocalWorkerGroup(ResourcePool([1]), classes, **TIMEOUTS) as first:
        roles = first.spawn()
        assert roles["actor"].where()[0] != roles["ref"].where()[0]
        assert roles["ref"].execute_all("helper", 1) == [3]
        with pytest.raises(AttributeError, match=r"ambiguous.*\['actor', 'ref'\]"):
            first.score(DataProto())
        with LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Actor), **TIMEOUTS):
            pass
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_a_closed_group_says_so() -> None:
    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Actor), **TIMEOUTS)
    with pytest.raises(AttributeError, match=r"call spawn\(\) first"):
        group.echo(1)
    echo = group.spawn()["Actor"].echo
    group.close()
    group.close()
    with pytest.raises(WorkerDied, match="was closed"):
        echo(1)


def test_a_constructor_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Actor, size=3), **TIMEOUTS).spawn()
    assert not dist.is_initialized()


def test_more_than_one_process_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runs one process, but pool 'pool' asks for 4 \(\[2, 2\]\).*trainer.worker_group=ray"):
        LocalWorkerGroup(ResourcePool([2, 2]), ClassWithInitArgs(Actor), **TIMEOUTS)


def test_a_method_name_that_groups_use_themselves_is_refused() -> None:
    class Closing(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def close(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Closing\.close cannot be registered"):
        LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Closing), **TIMEOUTS).spawn()


def test_an_unknown_dispatch_mode_is_found_at_spawn() -> None:
    class Odd(Worker):
        @register(dispatch_mode="no such mode")
        def act(self) -> None: ...

    with pytest.raises(ValueError, match="unknown dispatch mode 'no such mode'"):
        LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Odd), **TIMEOUTS).spawn()


def test_this_machine_is_one_node_that_takes_one_process() -> None:
    (node,) = LocalWorkerGroup.nodes()
    assert node.cpus >= 1
    assert node.memory > 2**20
    assert place([ResourcePool([1])], [node]) == {"pool": [node.name]}


def test_ray_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Actor), **TIMEOUTS) as group:
        assert group.echo(1) == [1]
