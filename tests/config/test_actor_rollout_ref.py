import pytest

from lockstep.config.actor_rollout_ref import choose_weight_sync
from lockstep.errors import ConfigError


def choose(asked: str = "auto", engine: str = "native", **changes: bool) -> str:
    where = {"hybrid": False, "same_process": False, "same_machine": True, "cuda": False, "linux": True}
    return choose_weight_sync(asked, engine, **where | changes)


@pytest.mark.parametrize(
    ("engine", "where", "method"),
    [
        ("native", {"hybrid": True}, "shared"),
        ("hf", {"hybrid": True, "cuda": True}, "shared"),
        ("vllm", {"hybrid": True}, "ipc"),
        ("vllm", {"hybrid": True, "cuda": True}, "ipc"),
        ("vllm", {"hybrid": True, "linux": False}, "disk"),
        ("sglang", {"hybrid": True}, "disk"),
        ("sglang", {}, "disk"),
        ("native", {}, "ipc"),
        ("native", {"same_process": True}, "ipc"),
        ("native", {"same_process": True, "linux": False}, "disk"),
        ("native", {"same_machine": False}, "broadcast"),
        ("native", {"linux": False}, "broadcast"),
        ("native", {"cuda": True}, "broadcast"),
        ("native", {"cuda": True, "same_process": True}, "ipc"),
        ("vllm", {"same_machine": False}, "broadcast"),
    ],
)
def test_auto_takes_the_way_that_copies_least_where_the_workers_are(engine: str, where: dict[str, bool], method: str) -> None:
    assert choose("auto", engine, **where) == method
    assert choose(method, engine, **where) == method


@pytest.mark.parametrize(
    ("asked", "engine", "where", "possible"),
    [
        ("ipc", "native", {"hybrid": True}, "auto, shared"),
        ("shared", "vllm", {"hybrid": True}, "auto, ipc, disk"),
        ("broadcast", "vllm", {"hybrid": True}, "auto, ipc, disk"),
        ("broadcast", "native", {"same_process": True}, "auto, ipc, disk"),
        ("shared", "native", {}, "auto, ipc, broadcast, disk"),
        ("ipc", "native", {"same_machine": False}, "auto, broadcast, disk"),
        ("ipc", "sglang", {}, "auto, disk"),
    ],
)
def test_a_way_that_cannot_work_is_refused_with_those_that_can(
    asked: str, engine: str, where: dict[str, bool], possible: str
) -> None:
    with pytest.raises(ConfigError, match=f"weight_sync={asked} cannot serve rollout.name={engine} .*choose one of: {possible}$"):
        choose(asked, engine, **where)
