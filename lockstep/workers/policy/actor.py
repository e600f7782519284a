"""The actor: the policy that learns, and the way its weights take to a rollout in other workers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig
from lockstep.models.packing import Budget
from lockstep.workers.engine.base import TrainEngine
from lockstep.workers.weight_sync.base import Manifest, WeightOffer, WeightSender
from lockstep.workers.weight_sync.source import make_sender


class ActorPart:
    """An engine that learns. `dtype` is the type in which the rollout computes."""

    def __init__(self, engine: TrainEngine, config: ActorRolloutRefConfig, dtype: torch.dtype) -> None:
        self.engine, self.budget = engine, actor_budget(config)
        self._rollout_config, self._dtype = config.rollout, dtype
        self._sender: WeightSender | None = None
        """The sync that is under way; on rank 0 only."""

    def cast_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The whole weights in the type of the rollout. Gathering them is for all ranks."""
        for name, tensor in self.engine.export_weights():
            yield name, tensor.detach().to(self._dtype) if tensor.is_floating_point() else tensor

    def offer(self, method: str, version: int, num_receivers: int, rank: int) -> WeightOffer | None:
        """Begin a sync, ending one that is under way; what receivers need, from rank 0 (None from the others)."""
        self.withdraw()
        if rank == 0:
            self._sender = make_sender(method, self._rollout_config, version, num_receivers, self.engine.device)
        if method != "broadcast":
            self.send()
        return self._sender.offer() if self._sender is not None else None

    def send(self) -> Manifest | None:
        """Send the weights; what was sent, from rank 0 (None from the others)."""
        if self._sender is not None:
            return self._sender.send(self.cast_weights())
        for _ in self.cast_weights():
            pass
        return None

    def withdraw(self) -> None:
        """End the sync, and give its memory back. May be called again."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def actor_budget(config: ActorRolloutRefConfig) -> Budget:
    """What the actor computes at once."""
    return Budget(config.actor.max_tokens, config.actor.ppo_micro_batch_size_per_gpu)
