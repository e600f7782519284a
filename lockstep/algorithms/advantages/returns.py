"""Estimators that judge a token by the whole batch: REINFORCE++ (Hu, arXiv 2501.03262). They need no critic.

Both are whitened over the selected tokens of the batch, as in `masked.masked_whiten`; the returns are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.algorithms.advantages.scores import GroupScores
from lockstep.algorithms.masked import masked_whiten, zero_outside


def reinforce_plus_plus(*, token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """The discounted rewards still to come, whitened.

    ```text
    G_t         = r_t + gamma G_next       returns = G
    advantages  = whiten(G)
    ```

    "Next" is the row's next token *of the policy*: tool output in between costs no discount. After the last one G is 0.
    """
    rewards, mask = zero_outside(token_level_rewards, response_mask), response_mask.bool()
    returns = torch.zeros_like(rewards)
    togo = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        togo = torch.where(mask[:, t], rewards[:, t] + gamma * togo, togo)
        returns[:, t] = togo
    returns = zero_outside(returns, response_mask)
    return masked_whiten(returns, response_mask), returns


def reinforce_plus_plus_baseline(*, token_level_rewards: Tensor, response_mask: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """The score against its group's mean, with one scale for the whole batch instead of one for each group.

    ```text
    advantages  = whiten(s_i - mean_g)     over tokens, so long rows weigh more
    returns     = s_i
    ```

    The special cases of `group` hold before whitening. Its mean is over tokens and is not 0 when lengths differ, so a
    group of equal scores shares one small number; when all groups are such, all get exactly 0.

    Raises ValueError when `group` is not one number a row.
    """
    rows = GroupScores(token_level_rewards, response_mask, group)
    centred = rows.over_tokens(rows.score_if_alone(rows.centred))
    return masked_whiten(centred, response_mask), rows.over_tokens(rows.scores)
