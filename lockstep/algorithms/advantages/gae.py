"""The estimator that a critic makes possible."""

import torch
from torch import Tensor

from lockstep.algorithms.advantages.recursion import discounted_sums, selected
from lockstep.algorithms.masking import masked_whiten, zero_outside
from lockstep.algorithms.rows import Rows


def gae(
    *, token_level_rewards: Tensor, response_mask: Tensor, rows: Rows, values: Tensor, gamma: float | Tensor, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438), whitened over the mask of the batch.

    ```text
    delta_t  = r_t + gamma V_next - V_t
    A_t      = delta_t + gamma lam A_next        advantages = whiten(A)
    returns  = A + V                             from A before whitening
    ```

    "Next" is the row's next token *of the policy*: tool output in between costs no discount. After the last one V and A
    are 0, so a response cut at the length limit is treated as if it had ended there. gamma and lam may be [M], one for each t.
    """
    places, written = selected(response_mask, rows)
    gamma, lam = (x[places] if isinstance(x, Tensor) else x for x in (gamma, lam))
    reward, value = (zero_outside(x, response_mask)[places] for x in (token_level_rewards, values))
    has_next = written.index == written.index.roll(-1)
    has_next[-1:] = False
    delta = reward + gamma * torch.where(has_next, value.roll(-1), 0) - value
    advantage = discounted_sums(delta, written, gamma * lam)
    advantages, returns = (torch.zeros_like(values).index_copy(0, places, x) for x in (advantage, advantage + value))
    return masked_whiten(advantages, response_mask), returns
