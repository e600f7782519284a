"""PPO's own loss. What it takes and returns: see the package."""

import torch
from torch import Tensor

from lockstep.algorithms.masked import zero_outside
from lockstep.algorithms.policy_losses.ratio import check_clip_range, clipped_surrogate, token_log_ratio, token_metrics
from lockstep.errors import ConfigError


def vanilla(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (Schulman et al., arXiv 1707.06347) with a dual clip (Ye et al., arXiv 1912.09729).

    ```text
    x     = clamp(log_prob - old_log_prob, -20, 20)           rho = exp(x)
    l     = max(-A rho, -A clip(rho, 1 - low, 1 + high))
    loss  = min(l, -A c) where A < 0, else l
    ```

    Metrics: `pg_clipfrac` is 1 where the clipped branch is strictly larger; `pg_clipfrac_lower` is 1 where A < 0 and
    the dual clip is strictly smaller than l.

    Raises ConfigError when the clip ranges are not 0 <= low <= 1, 0 <= high, 1 < c.
    """
    check_clip_range("vanilla", clip_ratio_low, clip_ratio_high)
    if not clip_ratio_c > 1:
        raise ConfigError(
            f"the vanilla policy loss needs clip_ratio_c above 1, not {clip_ratio_c}: set actor_rollout_ref.actor.clip_ratio_c"
        )
    advantages = zero_outside(advantages, response_mask)
    log_ratio = token_log_ratio(log_prob, old_log_prob, response_mask)
    loss, is_clipped = clipped_surrogate(advantages, log_ratio.exp(), clip_ratio_low, clip_ratio_high)
    bound = -advantages * clip_ratio_c
    is_bounded = (advantages < 0) & (loss > bound)
    return torch.where(is_bounded, bound, loss), token_metrics(log_ratio, is_clipped, is_bounded)
