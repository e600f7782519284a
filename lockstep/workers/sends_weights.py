"""The part of a policy's worker that takes weights out of its process: to a rollout in other workers, or as checksums."""

import socket

from torch import Tensor

from lockstep.config.actor_rollout_ref import Parts
from lockstep.single_controller.base import Dispatch, Worker, register
from lockstep.workers.policy.actor import ActorPart
from lockstep.workers.policy.rollout import RolloutPart
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, checksum


class SendsWeights(Worker):
    """For a worker that has an actor, or a rollout of its own; `trainer/ppo/weight_sync.py` says in which order a sync calls these."""

    role: str
    parts: Parts
    actor: ActorPart
    rollout: RolloutPart

    @register(Dispatch.ONE_TO_ALL)
    def export_weights(self) -> list[tuple[str, Tensor]] | None:
        """The actor's whole weights on the CPU, from rank 0 (None from the others): what a rollout of its own loads."""
        weights = [(name, tensor.cpu()) for name, tensor in self.actor.engine.export_weights()]
        return weights if self.rank == 0 else None

    @register(Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> list[tuple[str, int]]:
        """Name and checksum of the actor's weights."""
        return [(name, checksum(tensor)) for name, tensor in self.actor.engine.export_weights()]

    @register(Dispatch.ONE_TO_ALL)
    def machine(self) -> str:
        """The machine that this process runs on."""
        return socket.gethostname()

    @register(Dispatch.ONE_TO_ALL)
    def offer_weights(self, method: str, version: int, num_receivers: int) -> WeightOffer | None:
        """Begin a sync of the actor's weights to a rollout in other workers: what those need, from rank 0 (None from the others).

        An offer without a manifest is a stream: then `send_weights` here and `receive_weights` there run at the same time.
        """
        return self.actor.offer(method, version, num_receivers, self.rank)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self) -> Manifest | None:
        """Send the stream that `offer_weights` began; what was sent, from rank 0 (None from the others)."""
        return self.actor.send()

    @register(Dispatch.ONE_TO_ALL)
    def withdraw_weights(self) -> None:
        """End the sync, and give its memory back."""
        self.actor.withdraw()

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, offer: WeightOffer) -> Manifest:
        """Replace the weights of a rollout in workers of its own; what it has now."""
        assert not self.parts.actor, f"the rollout of a worker of role {self.role} has the actor's weights"
        return self.rollout.engine.receive(offer, self.device, self.rank)
