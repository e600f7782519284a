"""Which tokens top-k, top-p and min-p keep, by a sort in float64: what the searches without a sort are compared with."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

ROUNDING = 2e-6
"""How near to top_p the probability above a token may be for float32 sums to fall on either side."""


def kept_by_sort(row: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """[vocabulary] bool each: whether a token of `row` (logits at the temperature) stays, and whether rounding could say otherwise."""
    row = row.double()
    ordered = row.sort(descending=True).values
    likelier = torch.searchsorted(-ordered, -row)  # how many are strictly above
    among = likelier < (top_k if top_k > 0 else len(row))
    weights = torch.where(ordered >= row[among].min(), torch.exp(ordered - ordered[0]), 0.0)
    ends = torch.cat([torch.zeros(1, dtype=torch.float64), weights.cumsum(0)])
    above = ends[likelier] / ends[-1]
    best = likelier == 0
    kept = among & ((above < top_p) | best | (top_p >= 1.0)) & (row >= ordered[0] + math.log(min_p or 1e-300))
    edge = ordered[0] + math.log(min_p or 1e-300)
    near = ((above - top_p).abs() < ROUNDING) & (top_p < 1.0) & ~best
    # The sum of the largest logit and log(min_p) is rounded too.
    return kept, near | ((row - edge).abs() < 1e-5 + 2**-22 * ordered[0].abs())


def check_kept(kept: Tensor, row: Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """`kept` [vocabulary] bool are the right tokens of `row`; those without weight in float32 do not matter."""
    want, near = kept_by_sort(row, top_k, top_p, min_p)
    counts = (row > row.max() - 104.0) & ~near
    wrong = (kept != want) & counts
    assert not wrong.any(), f"{int(wrong.sum())} tokens, the first {int(wrong.nonzero()[0])}, with {top_k=}, {top_p=}, {min_p=}"


def odd_rows(vocabulary: int, seed: int) -> dict[str, Tensor]:
    """Rows that a search could stumble over."""
    generator = torch.Generator().manual_seed(seed)

    def randn() -> Tensor:
        return torch.randn(vocabulary, generator=generator)

    peaked, impossible, two = 0.1 * randn(), randn(), torch.zeros(vocabulary)
    peaked[vocabulary // 3] = 30.0
    impossible[vocabulary // 50 :] = -torch.inf
    two[::2] = -1.0
    return {
        "normal": randn(),
        "wide": 5 * randn(),
        "flat": 1e-4 * randn(),
        "large": 1e4 + randn(),
        "bfloat16": (2 * randn()).bfloat16().float(),
        "coarse": (2 * randn()).round(),
        "equal": torch.full((vocabulary,), 1.5),
        "zeros of both signs": torch.where(randn() > 0, 0.0, -0.0),
        "two values": two,
        "peaked": peaked,
        "impossible": impossible,
        "one possible": torch.full((vocabulary,), -torch.inf).index_fill_(0, torch.tensor([vocabulary - 1]), -3.0),
        "far apart": torch.linspace(-1e4, 1e4, vocabulary)[torch.randperm(vocabulary, generator=generator)],
    }


def draw_options(rng: random.Random, vocabulary: int) -> tuple[int, float, float]:
    """top_k, top_p and min_p."""
    top_k = rng.choice([-1, -1, 1, 2, 50, vocabulary // 2, vocabulary - 1, vocabulary, 10 * vocabulary])
    top_p = rng.choice([1.0, 1.0, 0.95, 0.5, 0.999, 1e-6, 0.0, 1 - 2**-24])
    return top_k, top_p, rng.choice([0.0, 0.0, 0.05, 1.0])
