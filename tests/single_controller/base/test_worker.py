import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.single_controller.base.worker import ClassWithInitArgs, Worker, WorkerEnvironment, worker_environment


class Plain(Worker):
    def __init__(self, scale: int, offset: int = 0) -> None:
        self.seen = (self.rank * scale + offset, self.world_size, self.local_rank, self.device)


def test_the_constructor_sees_its_place_without_calling_super() -> None:
    with worker_environment(WorkerEnvironment(3, 4, 1, torch.device("meta"), "critic")):
        worker = Plain(10, offset=1)
    assert worker.seen == (31, 4, 1, torch.device("meta"))
    assert worker.rank == 3


def test_a_worker_without_a_host_is_rank_zero_of_one_on_the_cpu() -> None:
    with pytest.raises(KeyError), worker_environment(WorkerEnvironment(3, 4)):
        raise KeyError
    assert Plain(10).seen == (0, 1, 0, torch.device("cpu"))


def test_deferred_construction() -> None:
    later = ClassWithInitArgs(Plain, 10, offset=2)
    with worker_environment(WorkerEnvironment(rank=1, world_size=2)):
        assert later().seen[0] == 12


def test_a_class_that_ray_has_wrapped_is_unwrapped():
    ray = pytest.importorskip("ray")

    class Plain(Worker):
        pass

    assert ClassWithInitArgs(ray.remote(Plain)).cls is Plain
    assert ClassWithInitArgs(Plain).cls is Plain


def test_verls_share_of_rows_is_every_ranks_own_and_no_other():
    with worker_environment(WorkerEnvironment(rank=1, world_size=2)):
        worker = Worker()
    worker._register_dispatch_collect_info("train", dp_rank=1, is_collect=True)
    with pytest.raises(ConfigError, match="rank 1 asks for the rows of data-parallel rank 0"):
        worker._register_dispatch_collect_info("train", dp_rank=0, is_collect=True)
    with pytest.raises(ConfigError, match="is_collect=False"):
        worker._register_dispatch_collect_info("train", dp_rank=1, is_collect=False)
