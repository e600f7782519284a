"""PPO's loss, and what all policy losses share: the log-ratio, the clip, the check of its range, and the metrics.

The package says what a loss takes and returns.
"""

import torch
from torch import Tensor

from lockstep.algorithms.masking import zero_outside
from lockstep.errors import ConfigError

_MAX_LOG_RATIO = 20.0
"""exp(20) is about 5e8: far outside any clip range, and still finite in float32 and bfloat16."""


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


def token_log_ratio(log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """clamp(log_prob - old_log_prob, -20, 20) [M], 0 outside the mask. The clamp stops the gradient beyond it."""
    return zero_outside(log_prob - old_log_prob, response_mask).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def clipped_surrogate(advantages: Tensor, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)), and where the clipped branch is strictly larger; all [M]."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    is_clipped = clipped > unclipped
    return torch.where(is_clipped, clipped, unclipped), is_clipped


def check_clip_range(loss: str, low: float, high: float) -> None:
    """ConfigError, naming the loss, unless 0 <= low <= 1 and 0 <= high."""
    if not (0 <= low <= 1 and high >= 0):
        raise ConfigError(
            f"the {loss} policy loss needs 0 <= clip_ratio_low <= 1 and clip_ratio_high >= 0, not {low} and {high}: set "
            "actor_rollout_ref.actor.clip_ratio_low and clip_ratio_high"
        )


def token_metrics(log_ratio: Tensor, is_clipped: Tensor | None = None, is_bounded: Tensor | None = None) -> dict[str, Tensor]:
    """The metrics that every loss has, [M] each: see the package. None means that the loss has no such clip."""
    log_ratio = log_ratio.detach()
    none = torch.zeros_like(log_ratio)
    return {
        "pg_clipfrac": none if is_clipped is None else is_clipped.to(log_ratio.dtype),
        "pg_clipfrac_lower": none if is_bounded is None else is_bounded.to(log_ratio.dtype),
        "ppo_kl": -log_ratio,
    }
