"""A pass over made-up rows before the first step: kernels are compiled and libraries make their workspaces while models are loaded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.models.load import Head
from lockstep.models.packing import Budget
from lockstep.protocol import DataProto, Ragged
from lockstep.utils.hf_config import context_limit
from lockstep.workers.engine.base import TokenOutputs, TokenRows, TrainEngine

WARMED = ("fsdp", "fsdp2")
"""The engines whose modules clear their gradients as torch's do."""
PROMPT, RESPONSE, ROWS = 48, 16, 4
"""Tokens of the made-up rows, of which neighbours share a prompt, as the samples of a step do."""


def warm_update(engine: TrainEngine, *, learns: bool, temperature: float, entropy_grad: bool = False) -> None:
    """Compute a few rows forwards, and where the engine `learns` backwards, as its stages do. Weights, optimizer and random numbers stay as
    they are; gradients are cleared."""
    if engine.head is Head.SCORE or engine.teacher is not None:
        return  # their rows are others
    config: Any = engine.module.config
    limit = context_limit(config)
    context = PROMPT + RESPONSE if limit is None else limit.tokens
    rows, budget = _rows(max(1, min(PROMPT, context - RESPONSE))), Budget(ROWS * (PROMPT + RESPONSE), None)
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


def _loss(outputs: TokenOutputs, tokens: TokenRows) -> tuple[Tensor, Mapping[str, Any]]:
    read = [column for column in (outputs.log_probs, outputs.entropy, outputs.values) if column is not None]
    return sum((column.float().sum() for column in read), torch.zeros((), device=read[0].device)), {}
