"""The estimator whose baseline differs from token to token: the optimal token baseline (arXiv 2602.07078)."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.algorithms.advantages.returns import rewards_to_go
from lockstep.algorithms.advantages.scores import group_index
from lockstep.algorithms.masked import zero_outside

_WEIGHT_FLOOR = 1e-12
"""Added to every weight: a group whose tokens were all certain (weight 0) has its plain mean as baseline."""


def optimal_token_baseline(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
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
        old_log_probs: [B, T], log pi of the sampled token.
        sum_pi_squared: [B, T], the sum over the vocabulary. When None its part of the sampled token stands for it:
            w = (1 - pi)^2, the squared gradient by that token's own logit.
        rollout_is_weights: [B, T]; w is multiplied by their square, which minimises the variance under these weights.
    """
    returns, weights = returns_and_energy(token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    order = _selected_first(response_mask)
    g, w, mask = (x.gather(1, order) for x in (returns, weights, response_mask))
    advantages = torch.zeros_like(returns).scatter(1, order, against_column(g, w, mask, group))
    return zero_outside(advantages, response_mask), returns


def returns_and_energy(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor | None,
    rollout_is_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """G and W of `optimal_token_baseline`, [B, T] each; W in float64."""
    pi = zero_outside(old_log_probs.double(), response_mask).exp()
    energy = (1 - pi).square() if sum_pi_squared is None else 1 - 2 * pi + zero_outside(sum_pi_squared.double(), response_mask)
    if rollout_is_weights is not None:
        energy = energy * zero_outside(rollout_is_weights.double(), response_mask).square()
    return rewards_to_go(token_level_rewards, response_mask), zero_outside(energy, response_mask).cumsum(dim=1)


def against_column(returns: Tensor, weights: Tensor, response_mask: Tensor, group: Tensor) -> Tensor:
    """Returns [B, T] less the weighted mean, in the same column, of the rows of the group that have a token there.

    The baseline is 0 where a row is alone in its column. Outside the mask the result is 0.
    """
    mask, dtype, returns = response_mask.bool(), returns.dtype, returns.double()
    index = group_index(group, returns.shape[0])

    def over_group(x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, index, x)[index]

    # Of equal returns the distances to their largest are exactly 0, while their rounded mean can differ from each.
    candidates = torch.where(mask, returns, -torch.inf)
    largest = torch.full_like(returns, -torch.inf).scatter_reduce(0, index[:, None].expand_as(returns), candidates, "amax")[index]
    below = torch.where(mask, returns - largest, 0)
    weights = torch.where(mask, weights + _WEIGHT_FLOOR, 0)
    total = over_group(weights)
    centred = below - over_group(weights * below) / torch.where(total == 0, 1, total)
    alone = over_group(mask.to(returns.dtype)) < 2
    return zero_outside(torch.where(alone, returns, centred), mask).to(dtype)


def _selected_first(response_mask: Tensor) -> Tensor:
    """[B, T]: for each row, the positions of its selected tokens in order, then the others."""
    return response_mask.bool().logical_not().to(torch.int8).argsort(dim=1, stable=True)
