"""Estimators without a critic that use the rewards still to come, or whiten over the whole batch.

```text
reinforce_plus_plus           the discounted rewards to come, whitened            (Hu, arXiv 2501.03262)
reinforce_plus_plus_baseline  the score against its group's mean, whitened        (the same)
gdpo                          each part of the reward against its group, summed, whitened   (arXiv 2601.05242)
remax                         the rewards to come against the greedy answer's score         (Li et al., arXiv 2310.10505)
```

Whitening is over the selected tokens of the batch, as in `masking.masked_whiten`; returns are never whitened.
"""

import torch
from torch import Tensor

from lockstep.algorithms.advantages.group import STD_FLOOR, GroupScores, group_scores
from lockstep.algorithms.advantages.recursion import discounted_sums, selected
from lockstep.algorithms.masking import masked_whiten, zero_outside
from lockstep.algorithms.rows import Rows


def rewards_to_go(token_level_rewards: Tensor, response_mask: Tensor, rows: Rows, gamma: float | Tensor = 1.0) -> Tensor:
    """G_t = r_t + gamma G_next [M], 0 outside the mask; "next" is the row's next selected token."""
    rewards = zero_outside(token_level_rewards, response_mask)
    places, written = selected(response_mask, rows)
    gamma = gamma[places] if isinstance(gamma, Tensor) else gamma
    return torch.zeros_like(rewards).index_copy(0, places, discounted_sums(rewards[places], written, gamma))


def reinforce_plus_plus(
    *, token_level_rewards: Tensor, response_mask: Tensor, rows: Rows, gamma: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The discounted rewards still to come, whitened.

    ```text
    G_t         = r_t + gamma G_next       returns = G
    advantages  = whiten(G)
    ```

    "Next" is the row's next token *of the policy*: tool output in between costs no discount. After the last one G is 0.
    """
    returns = rewards_to_go(token_level_rewards, response_mask, rows, gamma)
    return masked_whiten(returns, response_mask), returns


def reinforce_plus_plus_baseline(
    *, token_level_rewards: Tensor, response_mask: Tensor, rows: Rows, group: Tensor
) -> tuple[Tensor, Tensor]:
    """The score against its group's mean, with one scale for the whole batch instead of one for each group.

    ```text
    advantages  = whiten(s_i - mean_g)     over tokens, so long rows weigh more
    returns     = s_i
    ```

    The special cases of `group` hold before whitening. Its mean is over tokens and is not 0 when lengths differ, so a
    group of equal scores shares one small number; when all groups are such, all get exactly 0.

    Raises ValueError when `group` is not one number per row.
    """
    groups = group_scores(token_level_rewards, response_mask, rows, group)
    centred = groups.over_tokens(groups.score_if_alone(groups.centred))
    return masked_whiten(centred, response_mask), groups.over_tokens(groups.scores)


def gdpo(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    rows: Rows,
    group: Tensor,
    reward_parts: Tensor,
    reward_part_weights: Tensor | None = None,
    norm_adv_by_std_in_grpo: bool,
    epsilon: float = STD_FLOOR,
) -> tuple[Tensor, Tensor]:
    """Every part of the reward has the same voice, whatever its spread (GDPO, arXiv 2601.05242).

    ```text
    a_ik        = (p_ik - mean_g) / (std_g + epsilon)      part k of row i within its group, as in grpo
    advantages  = whiten(sum_k w_k a_ik)                   over tokens
    returns     = s_i, the row's reward as it is
    ```

    A sum of parts that is normalised afterwards (grpo) lets the part of the widest spread decide.

    Args:
        reward_parts: [B, K]. A row without a selected token may hold NaN.
        reward_part_weights: [K]; all 1 when None.

    The special cases of `group` hold for each part, before whitening. Raises ValueError when shapes do not fit.
    """
    if reward_parts.dim() != 2 or len(reward_parts) != len(rows):
        raise ValueError(f"reward_parts must be [{len(rows)}, parts], but its shape is {tuple(reward_parts.shape)}")
    weights = reward_parts.new_ones(reward_parts.shape[1]) if reward_part_weights is None else reward_part_weights
    if weights.shape != reward_parts.shape[1:]:
        raise ValueError(f"{reward_parts.shape[1]} reward parts need as many weights, not {tuple(weights.shape)}")
    whole = group_scores(token_level_rewards, response_mask, rows, group)
    total = torch.zeros_like(whole.scores)
    for part, weight in zip(reward_parts.double().unbind(1), weights.tolist(), strict=True):
        scores = torch.where(whole.counted > 0, part, 0)
        groups = GroupScores(scores, response_mask, rows, group, token_level_rewards.dtype)
        total = total + weight * groups.normalised(norm_adv_by_std_in_grpo, epsilon)
    return masked_whiten(whole.over_tokens(total), response_mask), whole.over_tokens(whole.scores)


def remax(*, token_level_rewards: Tensor, response_mask: Tensor, rows: Rows, reward_baselines: Tensor) -> tuple[Tensor, Tensor]:
    """REINFORCE with the score of the greedy answer to the same prompt as baseline (Li et al., arXiv 2310.10505).

    ```text
    G_t         = r_t + G_next             returns = G
    advantages  = G_t - b_i                b_i: `reward_baselines` [B]
    ```

    It needs one more response for each prompt, and no group: one sample per prompt is enough. Where the greedy answer is
    as good as the samples nothing is learned from the prompt, however they differ from each other.

    Raises ValueError when `reward_baselines` is not one number per row.
    """
    if reward_baselines.shape != rows.lengths.shape:
        raise ValueError(f"reward_baselines must have one number for each of {len(rows)} rows, not {tuple(reward_baselines.shape)}")
    returns = rewards_to_go(token_level_rewards, response_mask, rows)
    return zero_outside(returns - rows.spread(reward_baselines.to(returns.dtype)), response_mask), returns
