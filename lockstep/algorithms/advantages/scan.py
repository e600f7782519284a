"""Returns on the device that computed the values, without waiting for it: sums along rows in log2(length) passes over all tokens."""

import torch
from torch import Tensor

from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.rows import Rows


def gae_returns(rewards: Tensor, values: Tensor, response_mask: Tensor, rows: Rows, gamma: float, lam: float) -> Tensor:
    """The returns [M] of `gae` for the tokens of these rows; 0 outside the mask (bool [M]).

    A token outside the mask passes on what comes after it, so that "next" is the row's next token of the policy.
    """
    ends = (torch.cumsum(rows.lengths, 0) - 1)[rows.lengths > 0]
    goes_on = torch.ones_like(values).index_fill(0, ends.to(rows.device, non_blocking=True), 0.0)
    longest = int(rows.lengths.max()) if len(rows) else 0
    rewards, values = (zero_outside(x, response_mask) for x in (rewards, values))
    passed = goes_on.masked_fill(response_mask, 0.0)
    next_value = goes_on * scan(values, passed, longest).roll(-1)
    delta = zero_outside(rewards + gamma * next_value - values, response_mask)
    advantages = scan(delta, torch.where(response_mask, gamma * lam * goes_on, goes_on), longest)
    return zero_outside(advantages + values, response_mask)


def scan(x: Tensor, factor: Tensor, longest: int) -> Tensor:
    """S_t = x_t + factor_t S_(t+1) for finite x, factor [M]; `factor` is 0 at the last token of each row, and no row is longer than
    `longest`.

    Each pass doubles how far S_t reaches. What rolls in from the next row, or from the start, is multiplied by a product with that 0.
    """
    reach = 1
    while reach < longest:
        x = x + factor * x.roll(-reach)
        factor = factor * factor.roll(-reach)
        reach *= 2
    return x
