"""Warm-up before the first step: kernels are compiled and libraries make their workspaces while models are loaded."""

from typing import Any, Protocol

import torch

from lockstep.config.actor_rollout_ref import ActorRolloutRefConfig, Parts, RolloutConfig
from lockstep.config.sampling import SamplingParams
from lockstep.models.hf_config import context_limit
from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.workers.engine.base import LossOutput, TokenOutputs, TokenRows, TrainEngine
from lockstep.workers.policy import ActorPart, ReferencePart, RolloutPart
from lockstep.workers.rollout.base import RolloutEngine

WARMED = ("fsdp", "fsdp2")
"""The strategies whose modules clear their gradients as torch's do."""
PROMPT = 48
RESPONSE = 16
ROWS = 4
"""Sizes of the made-up rows. Neighbours share a prompt, as the samples of a step do."""


class Policy(Protocol):
    """The parts of an ActorRolloutRefWorker; it has those of its role."""

    actor: ActorPart
    rollout: RolloutPart
    ref: ReferencePart


def warm_up(worker: Policy, config: ActorRolloutRefConfig, parts: Parts) -> None:
    """Generate, compute log-probs and learn once with made-up rows, as far as the worker has the parts for it."""
    actor = config.actor
    rollout = config.rollout
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
    """Warm up the native engine on a GPU. Other engines compile when they start; on a CPU there is nothing to compile."""
    from lockstep.generation import NativeRollout

    if isinstance(engine, NativeRollout) and engine.module.device.type == "cuda":
        from lockstep.generation import warm_generation  # needs Triton

        warm_generation(engine, _sampling(rollout), rollout.n)


def _sampling(rollout: RolloutConfig) -> SamplingParams:
    """Return the sampling of a step, as far as kernels depend on it."""
    return rollout.params(max_tokens=2, stop_token_ids=(), seed=0)


def warm_update(engine: TrainEngine, *, learns: bool, temperature: float, entropy_grad: bool = False) -> None:
    """Compute a few rows forwards and, if the engine `learns`, backwards.

    Clears the gradients. Weights, optimizer and random numbers stay as they are.
    """
    if engine.head is Head.SCORE or engine.teacher is not None:
        return  # the rows of these look different
    config: Any = engine.module.config
    limit = context_limit(config)
    context = PROMPT + RESPONSE if limit is None else limit.tokens
    rows = _rows(max(1, min(PROMPT, context - RESPONSE)))
    budget = Budget(ROWS * (PROMPT + RESPONSE), None)
    with torch.random.fork_rng([engine.device] if engine.device.type == "cuda" else []), engine.on_device():
        engine.forward(rows, budget, temperature)
        if learns:
            engine.forward_backward(rows, _loss, budget, temperature, entropy_grad)
            engine.module.zero_grad()


def _rows(width: int) -> DataProto:
    """With prompts of `width` tokens."""
    prompts = [[1 + number // 2] * width for number in range(ROWS)]
    responses = Ragged.from_rows([[3] * RESPONSE] * ROWS, dtype=torch.int64)
    columns = {
        "prompts": Ragged.from_rows(prompts, dtype=torch.int64),
        "responses": responses,
        "response_mask": responses.like(torch.ones_like(responses.values)),
    }
    return DataProto.from_dict(columns, {"index": list(range(ROWS))})


def _loss(outputs: TokenOutputs, tokens: TokenRows) -> LossOutput:
    read = [column for column in (outputs.log_probs, outputs.entropy, outputs.values) if column is not None]
    return LossOutput(sum((column.float().sum() for column in read), torch.zeros((), device=read[0].device)), {})
