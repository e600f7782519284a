"""The driver's side of a sync, with groups that only play their part, and once with real ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.groups import TIMEOUTS
from helpers.rollouts import make_requests, make_rollout, sampling
from helpers.tiny import save_tiny_model

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.errors import ConfigError, WeightSyncError, WorkerDied, WorkerError
from lockstep.protocol import DataProto, Ragged
from lockstep.single_controller.base import ClassWithInitArgs, ResourcePool
from lockstep.single_controller.ray import RayWorkerGroup
from lockstep.trainer.ppo.roles import WeightExchange
from lockstep.workers.engine_workers import ActorRolloutRefWorker

MANIFEST = {"a": 1, "b": 2}


class Answer:
    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class WeightOffer:
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
        return [WeightOffer(None if method == "broadcast" else MANIFEST), None]

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

    def receive_weights(self, offer: WeightOffer) -> Answer:
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


@pytest.mark.ray
def test_workers_in_other_processes_generate_from_the_actors_weights_after_a_sync(ray_cluster: None, tmp_path: Path) -> None:
    """One process has the actor, another a rollout of another model; broadcast, and by shared memory."""

    def group(role: str, seed: int) -> RayWorkerGroup:
        config = ActorRolloutRefConfig(model=ModelConfig(path=save_tiny_model(tmp_path / role, seed=seed)))
        arguments = {"seed": 1, "pad_token_id": 0, "total_updates": 1, "max_response_length": 12}
        worker = ClassWithInitArgs(ActorRolloutRefWorker, config, role, **arguments)
        return RayWorkerGroup(ResourcePool([1], use_gpu=False), worker, **TIMEOUTS)

    requests = make_requests(4)
    prompts = Ragged.from_rows([request.prompt_ids for request in requests])
    objects = {"index": [request.key[1] for request in requests], "sample": [request.key[2] for request in requests]}
    batch = DataProto.from_dict({"prompts": prompts}, {name: np.array(column, dtype=object) for name, column in objects.items()})
    greedy = sampling(temperature=0.0)
    expected = [
        completion.ids.tolist()
        for completion in make_rollout(save_tiny_model(tmp_path / "same", seed=3)).generate(requests, greedy)
    ]
    with group("actor", seed=3) as actor, group("rollout", seed=0) as rollout:
        actor.init_model()
        for method in ("broadcast", "ipc"):
            rollout.init_model()  # its own weights again
            exchange(actor, rollout, method).sync()
            found = rollout.generate_sequences(batch, sampling=greedy, step=4)
            assert [row.tolist() for row in found.ragged("responses").rows()] == expected
