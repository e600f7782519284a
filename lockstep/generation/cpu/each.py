"""What only some requests ask for, on the CPU: parameters of their own, and more log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.config.sampling import SamplingParams
from lockstep.generation.cpu.paged import StepBatch
from lockstep.generation.scores import places_of, take_scores, top_of, with_drawn

if TYPE_CHECKING:
    from lockstep.generation.cpu.passes import PassBackend
    from lockstep.generation.scheduler import Sample

OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""The sampling parameters that decide how a row is drawn."""


def draw_each(backend: PassBackend, logits: Tensor, draws: Sequence[Sample], sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """`PassBackend.draw` of samples with parameters of their own: those that have the same are drawn together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    params = [drawn.params or sampling for drawn in draws]
    for row, own in enumerate(params):
        groups.setdefault(tuple(getattr(own, name) for name in OPTIONS), []).append(row)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    log_probs = torch.empty(len(logits))
    for rows in groups.values():
        drawn = backend.draw_alike(logits[rows], [draws[row] for row in rows], params[rows[0]])
        tokens[rows], log_probs[rows] = (x.cpu() for x in drawn)
    return tokens, log_probs


def scored_step(backend: PassBackend, batch: StepBatch, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """`PassBackend.step` of a pass with samples that want more log-probs: they get them."""
    wanted = torch.cat([batch.sample_from, torch.tensor(places_of(batch.scored), dtype=torch.int64)])
    logits = backend.logits_of(batch, wanted)
    own = logits[: len(batch.draws)]
    prompts = logits[len(batch.draws) :]
    if batch.scored:
        take_scores(batch.scored, prompts, [(row.sample.params or sampling).temperature for row in batch.scored])
    if not batch.draws:
        return torch.empty(0, dtype=torch.int64), torch.empty(0)
    tokens, log_probs = backend.draw(own, batch.draws, sampling)
    for row, drawn in enumerate(batch.draws):
        if drawn.scores is not None and drawn.scores.top:
            top = top_of(own[row], drawn.scores.top, (drawn.params or sampling).temperature)
            drawn.scores.response.append(with_drawn(top, int(tokens[row]), float(log_probs[row])))
    return tokens, log_probs
