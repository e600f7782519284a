"""What happens to a policy's worker before its first step, around `init_model`: it is counted, placed, given numbers, and warmed up."""

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, Parts, PolicyKeys
from lockstep.models.load import Head
from lockstep.planner import Load, MemoryPlan, Model, Numbers, Rollout, RolloutNumbers, place_policy, policy_needs, settle_policy
from lockstep.single_controller.base import Dispatch, register
from lockstep.workers.engine.precision import compute_dtype
from lockstep.workers.model_worker import ModelWorker
from lockstep.workers.policy.actor import ActorPart
from lockstep.workers.policy.reference import ReferencePart
from lockstep.workers.policy.rollout import RolloutPart
from lockstep.workers.policy.warm_up import warm_up


class PreparedPolicy(ModelWorker):
    """The part of ActorRolloutRefWorker that a step does not run."""

    config: ActorRolloutRefConfig
    parts: Parts
    keys: PolicyKeys
    head: Head
    actor: ActorPart
    rollout: RolloutPart
    ref: ReferencePart

    def count(self, load: Load) -> tuple[list[Model], Rollout | None]:
        """See `ModelWorker.count`."""
        options: Any = {"load": load, "world_size": self.world_size, "element": self._dtype.itemsize, "head": self.head}
        return policy_needs(self.config, self.parts, self.keys, **options)

    @register(Dispatch.ONE_TO_ALL)
    def place_models(self, plans: Mapping[str, MemoryPlan]) -> None:
        """Make `init_model` do what was decided for the models that `memory_needs` named."""
        self.config = place_policy(self.config, plans)

    @register(Dispatch.ONE_TO_ALL)
    def settle(self, load: Load, numbers: RolloutNumbers) -> Numbers:
        """Take numbers for the keys that are auto; returns those that were taken."""
        self.config, chosen = settle_policy(self.config, self.parts, self.keys, load, numbers)
        return chosen

    @register(Dispatch.ONE_TO_ALL)
    def warm_up(self) -> None:
        """Compile what the stages will compute. Nothing that they compute changes."""
        with self.memory.stage("warm_up", (), None, "actor_rollout_ref.rollout.max_num_seqs"):
            warm_up(self, self.config, self.parts)

    @property
    def _dtype(self) -> torch.dtype:
        """The type that the actor computes in, and the rollout too."""
        return compute_dtype(self.config.actor.engine.dtype, self.device)
