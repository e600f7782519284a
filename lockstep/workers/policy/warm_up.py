"""The policy before its first step: what its stages will compute is compiled while it is loaded."""

from typing import Any

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, Parts, RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.generation import NativeRollout
from lockstep.workers.engine.warm_up import WARMED, warm_update
from lockstep.workers.rollout.base import RolloutEngine


def warm_up(worker: Any, config: ActorRolloutRefConfig, parts: Parts) -> None:
    """Generate, pass and learn once with made-up rows, as far as `worker` (an ActorRolloutRefWorker) has the parts for it."""
    actor, rollout = config.actor, config.rollout
    if parts.rollout:
        with worker.rollout.borrowed():
            _warm_rollout(worker.rollout.engine, rollout)
    if actor.strategy in WARMED:
        temperature = rollout.temperature
        if parts.actor:
            warm_update(worker.actor.engine, learns=True, temperature=temperature, entropy_grad=actor.entropy_coeff != 0)
        if config.loads_reference(parts):
            warm_update(worker.ref.engine, learns=False, temperature=temperature)


def _warm_rollout(engine: RolloutEngine, rollout: RolloutConfig) -> None:
    """The engines of others compile when they start; on a CPU there is nothing to compile."""
    if isinstance(engine, NativeRollout) and engine.module.device.type == "cuda":
        from lockstep.generation import warm_generation  # needs Triton

        warm_generation(engine, _sampling(rollout), rollout.n)


def _sampling(rollout: RolloutConfig) -> SamplingParams:
    """How the rows of a step are drawn, as far as kernels depend on it."""
    return SamplingParams(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        max_tokens=2,
        stop_token_ids=(),
        seed=0,
    )
