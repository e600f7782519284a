"""Sums that run along each row, from its last token to its first, with all rows at once."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lockstep.algorithms.rows import Rows


def discounted_sums(x: Tensor, rows: Rows, discount: float) -> Tensor:
    """S_t = x_t + discount S_(t+1) along each row of x [M], with S 0 after the row's last token: [M]."""
    # With the longest row first, the tokens at one place of all rows are a run, and the rows that go on are its beginning.
    rank = rows.lengths.argsort(descending=True, stable=True).argsort().to(rows.device)
    order = (rows.positions * len(rows) + rank[rows.index]).argsort()
    sums = x[order]
    runs = sums.split(torch.bincount(rows.positions).tolist())
    for later, earlier in itertools.pairwise(reversed(runs)):
        earlier[: len(later)] += discount * later
    return torch.empty_like(x).index_copy(0, order, sums)


def selected(response_mask: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """The places in [M] of the tokens that the mask selects, and how these divide into rows."""
    mask = response_mask.bool()
    return mask.nonzero().flatten(), Rows(rows.sum(mask).cpu(), rows.device)
