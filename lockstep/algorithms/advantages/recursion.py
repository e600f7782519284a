"""Sums that run along each row, from its last token to its first, with all rows at once."""

import itertools

import torch
from torch import Tensor

from lockstep.algorithms.rows import Rows


def discounted_sums(x: Tensor, rows: Rows, discount: float | Tensor) -> Tensor:
    """S_t = x_t + discount S_(t+1) along each row of x [M], with S 0 after the row's last token: [M]. A tensor [M] has one for each t."""
    # With the longest row first, the tokens at one place of all rows are a run, and the rows that go on are its beginning.
    rank = rows.lengths.argsort(descending=True, stable=True).argsort().to(rows.device)
    order = (rows.positions * len(rows) + rank[rows.index]).argsort()
    sums = x[order]
    counts = torch.bincount(rows.positions).tolist()
    discounts = torch.as_tensor(discount, dtype=x.dtype, device=x.device).expand_as(x)[order].split(counts)
    runs = sums.split(counts)
    for (later, _), (earlier, factor) in itertools.pairwise(zip(reversed(runs), reversed(discounts), strict=True)):
        earlier[: len(later)] += factor[: len(later)] * later
    return torch.empty_like(x).index_copy(0, order, sums)


def selected(response_mask: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """The places in [M] of the tokens that the mask selects, and how these divide into rows."""
    mask = response_mask.bool()
    return mask.nonzero().flatten(), Rows(rows.sum(mask).cpu(), rows.device)


def turn_discount(turn: Tensor, response_mask: Tensor, rows: Rows, discount: float) -> Tensor:
    """[M]: `discount` at the last selected token of each turn, 1 elsewhere: what a discount per turn is between two tokens.

    `turn` [M] are numbers that differ between neighbouring turns of a row.
    """
    places, written = selected(response_mask, rows)
    ends = (turn[places] != turn[places].roll(-1)) | (written.index != written.index.roll(-1))
    factors = torch.ones(len(turn), device=turn.device)
    factors[places[ends]] = discount
    return factors
