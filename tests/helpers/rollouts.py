"""Rollout engines on tiny models, and requests for them."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.engine import ModelConfig
from lockstep.config.sampling import SamplingParams
from lockstep.models.load import Head, load_model, share_structure
from lockstep.workers.rollout.registry import get_rollout
from lockstep.workers.rollout.request import Completion, DecodeText, Request

PAD = 0


def make_rollout(
    path: str, name: str = "native", max_num_seqs: int = 64, decode_text: DecodeText | None = None, **config: Any
) -> Any:
    """The engine over a module of its own; `config` goes to RolloutConfig."""
    rollout = get_rollout(name)
    model = load_model(ModelConfig(path=path), Head.LANGUAGE_MODEL, seed=0)
    section = RolloutConfig(name=name, max_num_seqs=max_num_seqs, **config)
    return rollout(share_structure(model, rollout.attention), section, PAD, decode_text)


def make_requests(count: int = 7, step: int = 4) -> list[Request]:
    """Prompts of 1 to 6 tokens."""
    generator = torch.Generator().manual_seed(count)
    return [Request(torch.randint(2, 32, (1 + 5 * i % 6,), generator=generator), (step, 10 + i, i % 2)) for i in range(count)]


def sampling(**changes: Any) -> SamplingParams:
    """Temperature 1, up to 12 tokens, token 1 ends."""
    defaults = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "max_tokens": 12, "stop_token_ids": (1,), "seed": 3}
    return SamplingParams(**defaults | changes)


def ids_of(completions: list[Completion]) -> list[list[int]]:
    """The tokens as plain lists."""
    return [completion.ids.tolist() for completion in completions]
