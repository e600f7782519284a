"""The driver's side of a sync, with groups that only play their part."""

from typing import Any

import pytest

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.errors import ConfigError, WeightSyncError, WorkerDied, WorkerError
from lockstep.trainer.ppo.weight_sync import WeightExchange

MANIFEST = {"a": 1, "b": 2}


class Answer:
    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Parcel:
    def __init__(self, manifest: Any) -> None:
        self.manifest = manifest


class Actor:
    world_size = 2

    def __init__(self, sent: Any = MANIFEST) -> None:
        self.sent, self.calls = sent, []

    def machine(self) -> list[str]:
        return ["here", "here"]

    def offer_weights(self, method: str, version: int, num_receivers: int) -> list[Any]:
        self.calls.append(("offer", method, version, num_receivers))
        return [Parcel(None if method == "broadcast" else MANIFEST), None]

    def send_weights(self) -> Answer:
        self.calls.append("send")
        return Answer(self.sent if isinstance(self.sent, Exception) else [self.sent, None])

    def withdraw_weights(self) -> None:
        self.calls.append("withdraw")


class Rollout:
    world_size = 3

    def __init__(self, received: Any = MANIFEST, machines: tuple[str, ...] = ("here", "here", "here")) -> None:
        self.received, self.machines = received, list(machines)

    def machine(self) -> list[str]:
        return self.machines

    def receive_weights(self, parcel: Parcel) -> Answer:
        return Answer(self.received if isinstance(self.received, Exception) else [MANIFEST, self.received, MANIFEST])


def exchange(actor: Actor, rollout: Rollout, method: str = "auto") -> WeightExchange:
    return WeightExchange(actor, rollout, RolloutConfig(weight_sync=method), same_process=False, cuda=False)


def test_every_sync_has_a_new_version_and_gives_its_memory_back() -> None:
    actor = Actor()
    both = exchange(actor, Rollout())
    both.sync()
    both.sync()
    assert actor.calls == [("offer", "ipc", 1, 3), "withdraw", ("offer", "ipc", 2, 3), "withdraw"]


def test_between_machines_both_sides_run_at_once() -> None:
    actor = Actor()
    exchange(actor, Rollout(machines=("here", "there", "there"))).sync()
    assert actor.calls == [("offer", "broadcast", 1, 3), "send", "withdraw"]


@pytest.mark.parametrize("method", ["ipc", "broadcast"])
def test_a_receiver_that_has_something_else_ends_the_run(method: str) -> None:
    actor = Actor()
    with pytest.raises(
        WeightSyncError, match="rank 1 of the rollout did not get the weights of version 1: 1 of 2 tensors differ, first b"
    ):
        exchange(actor, Rollout(received={"a": 1, "b": 3}), method).sync()
    assert actor.calls[-1] == "withdraw"


def test_of_two_errors_the_receivers_is_raised() -> None:
    """A sender whose receiver is gone can only say that the connection broke."""
    actor = Actor(sent=WorkerError("actor", "connection reset"))
    with pytest.raises(WorkerDied, match="out of memory"):
        exchange(actor, Rollout(received=WorkerDied("rollout", "out of memory")), "broadcast").sync()
    with pytest.raises(WorkerError, match="connection reset"):
        exchange(actor, Rollout(), "broadcast").sync()
    assert actor.calls[-1] == "withdraw"


def test_a_way_that_cannot_work_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="weight_sync=ipc cannot serve"):
        exchange(Actor(), Rollout(machines=("there",) * 3), "ipc")
