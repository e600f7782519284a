"""Which tokens may be drawn, where not all: top-k, top-p, min-p and the repetition penalty, with plain torch inside the captured step.

They sort the vocabulary or walk over it several times, so a step with a filter is slower than one without. The rules are those of
`rollout/sampling.py`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.native.gpu.rows import RowState
from lockstep.workers.rollout.native.gpu.runner import Filter
from lockstep.workers.rollout.sampling import keep_likely


def make_filter(sampling: SamplingParams) -> Filter | None:
    """The filter of these parameters; None where every token may be drawn as it is likely."""
    if not sampling.truncates and sampling.repetition_penalty == 1.0:
        return None
    # At temperature 0 the most likely token is taken, which no truncation drops.
    truncation = (sampling.top_k, sampling.top_p, sampling.min_p) if sampling.temperature else (-1, 1.0, 0.0)
    return _cached_filter(*truncation, sampling.repetition_penalty)


@functools.cache
def _cached_filter(top_k: int, top_p: float, min_p: float, penalty: float) -> Filter:
    """The same object for the same parameters: graphs are kept by it."""

    def keep(logits: Tensor, rows: RowState, first: int) -> tuple[Tensor, Tensor]:
        scaled = logits * rows.inverse_temperature
        normaliser = scaled.logsumexp(-1)
        if penalty != 1.0:
            assert rows.seen is not None, "a repetition penalty needs the tokens so far"
            here = slice(first, first + len(logits))
            seen = rows.seen[here].scatter_(1, rows.token[here, None], True)
            scaled = torch.where(seen, torch.where(scaled > 0, scaled / penalty, scaled * penalty), scaled)
        kept = keep_likely(scaled, top_k, top_p, min_p)
        return kept / rows.inverse_temperature, normaliser  # the draw applies the temperature

    return keep
