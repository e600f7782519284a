"""The estimator that a critic makes possible."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.algorithms.masked import masked_whiten, zero_outside


def gae(*, token_level_rewards: Tensor, response_mask: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438), whitened over the mask of the batch.

    ```text
    delta_t  = r_t + gamma V_next - V_t
    A_t      = delta_t + gamma lam A_next        advantages = whiten(A)
    returns  = A + V                             from A before whitening
    ```

    "Next" is the row's next token *of the policy*: tool output in between costs no discount. After the last one V and A
    are 0, so a response cut at the length limit is treated as if it had ended there.
    """
    rewards, values = zero_outside(token_level_rewards, response_mask), zero_outside(values, response_mask)
    mask = response_mask.bool()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    returns = zero_outside(advantages + values, response_mask)
    return masked_whiten(advantages, response_mask), returns
