"""The estimator whose baseline differs from token to token: the optimal token baseline (arXiv 2602.07078)."""

import torch
from torch import Tensor

from lockstep.algorithms.advantages.group import group_index
from lockstep.algorithms.advantages.recursion import discounted_sums, selected
from lockstep.algorithms.advantages.returns import rewards_to_go
from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.rows import Rows

_WEIGHT_FLOOR = 1e-12
"""Added to every weight: a group whose tokens were all certain (weight 0) has its plain mean as baseline."""


def optimal_token_baseline(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    rows: Rows,
    group: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """For the k-th token of a response, the mean return of its group at their k-th tokens, weighted by path energy.

    ```text
    G_k         = rewards from the k-th token on                 returns = G
    w_k         = 1 - 2 pi + sum_v pi(v)^2                       squared norm of the log-prob's gradient by the logits
    W_k         = w_1 + ... + w_k                                the energy of the path so far
    advantages  = G_k - sum_j(W_jk G_jk) / sum_j(W_jk)           over the rows j of the group that have a k-th token
    ```

    Tokens that the policy did not write (tools, users) are skipped: k counts the row's selected tokens. Where no other
    row of the group has a k-th token the baseline is 0, as for a group of one; equal returns give exactly 0.

    Args:
        old_log_probs: [M], log pi of the sampled token.
        sum_pi_squared: [M], the sum over the vocabulary. When None its part of the sampled token stands for it:
            w = (1 - pi)^2, the squared gradient by that token's own logit.
        rollout_is_weights: [M]; w is multiplied by their square, which minimises the variance under these weights.
    """
    returns, weights = _returns_and_energy(
        token_level_rewards, response_mask, rows, old_log_probs, sum_pi_squared, rollout_is_weights
    )
    places, written = selected(response_mask, rows)
    column = torch.zeros_like(rows.index).index_copy(0, places, written.positions)
    return _against_column(returns, weights, response_mask, rows, group, column), returns


def same_position_baseline(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    rows: Rows,
    group: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with tokens compared at the same position, whoever wrote those before it: for responses of one turn, under verl's name."""
    returns, weights = _returns_and_energy(
        token_level_rewards, response_mask, rows, old_log_probs, sum_pi_squared, rollout_is_weights
    )
    return _against_column(returns, weights, response_mask, rows, group, rows.positions), returns


def _returns_and_energy(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    rows: Rows,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor | None,
    rollout_is_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """G and W of `optimal_token_baseline`, [M] each; W in float64."""
    pi = zero_outside(old_log_probs.double(), response_mask).exp()
    energy = (1 - pi).square() if sum_pi_squared is None else 1 - 2 * pi + zero_outside(sum_pi_squared.double(), response_mask)
    if rollout_is_weights is not None:
        energy = energy * zero_outside(rollout_is_weights.double(), response_mask).square()
    # From the first token to the last is from the last to the first of the rows turned round.
    turned = Rows(rows.lengths.flip(0), rows.device)
    so_far = discounted_sums(zero_outside(energy, response_mask).flip(0), turned, 1.0).flip(0)
    return rewards_to_go(token_level_rewards, response_mask, rows), so_far


def _against_column(returns: Tensor, weights: Tensor, response_mask: Tensor, rows: Rows, group: Tensor, column: Tensor) -> Tensor:
    """Returns [M] less the weighted mean of the group's selected tokens that have the same number in `column` [M] int64.

    The baseline is 0 where a token is alone with its number. Outside the mask the result is 0.
    """
    mask = response_mask.bool()
    dtype = returns.dtype
    returns = returns.double()
    cell = (group_index(group, len(rows))[rows.index] * len(column) + column).unique(return_inverse=True)[1]

    def over_cell(x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, cell, x)[cell]

    # Of equal returns the distances to their largest are exactly 0, while their rounded mean can differ from each.
    candidates = torch.where(mask, returns, -torch.inf)
    largest = torch.full_like(returns, -torch.inf).scatter_reduce(0, cell, candidates, "amax")[cell]
    below = torch.where(mask, returns - largest, 0)
    weights = torch.where(mask, weights + _WEIGHT_FLOOR, 0)
    total = over_cell(weights)
    centred = below - over_cell(weights * below) / torch.where(total == 0, 1, total)
    alone = over_cell(mask.to(returns.dtype)) < 2
    return zero_outside(torch.where(alone, returns, centred), mask).to(dtype)
