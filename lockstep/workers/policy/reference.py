"""The reference: the policy that training started from."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig
from lockstep.models.packing import Budget
from lockstep.workers.engine.base import TrainEngine


@dataclass(frozen=True)
class ReferencePart:
    """An engine of its own, or an actor's that trains adapters."""

    engine: TrainEngine
    budget: Budget
    active: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context in which the engine is the reference: for an actor, the one without its adapters."""


def reference_budget(config: ActorRolloutRefConfig) -> Budget:
    """What the reference computes at once."""
    ref = config.ref
    tokens = ref.log_prob_max_token_len_per_gpu or config.actor.max_tokens
    return Budget(tokens, ref.log_prob_micro_batch_size_per_gpu)
