"""Policy losses: from log-probs and advantages to a loss per token.

A policy loss returns the loss matrix, which `aggregation.agg_loss` turns into a number, and metrics per token, which
the caller averages over the mask. Keeping both per token is what makes them independent of how the rows are batched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lockstep.algorithms.masked import zero_outside
from lockstep.algorithms.registry import registering, unknown_name
from lockstep.errors import ConfigError

_MAX_LOG_RATIO = 20.0
"""exp(20) is about 5e8: far outside any clip range, and still finite in float32 and bfloat16."""


class PolicyLoss(Protocol):
    """What `actor.policy_loss.loss_mode` names.

    Args:
        old_log_prob: [B, T] log-prob of each token under the policy before the update.
        log_prob: [B, T] the same under the policy that learns; the gradient flows here.
        advantages: [B, T].
        response_mask: [B, T] 1 where the policy wrote the token. What lies under its zeros may be NaN and must not
            reach the gradient, so clean the inputs with `zero_outside` first.
        clip_ratio_low, clip_ratio_high: the ratio is clipped to [1 - low, 1 + high].
        clip_ratio_c: bound of the dual clip for negative advantages, above 1.

    Returns:
        The loss per token [B, T], and detached metrics per token, each [B, T]. All are 0 outside the mask.
    """

    def __call__(
        self,
        *,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        clip_ratio_low: float,
        clip_ratio_high: float,
        clip_ratio_c: float,
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""Name -> loss: the values of `actor.policy_loss.loss_mode`."""


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Make the decorated function the policy loss `name`; ConfigError when the name is taken."""
    return registering("policy loss", POLICY_LOSSES, name)


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss registered as `name`; ConfigError when there is none."""
    if name not in POLICY_LOSSES:
        raise unknown_name("policy loss", name, POLICY_LOSSES)
    return POLICY_LOSSES[name]


@register_policy_loss("vanilla")
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
    the dual clip is strictly smaller than l; `ppo_kl` is -x, the k1 estimate of KL(old || new).

    Raises ConfigError when the clip ranges are not 0 <= low <= 1, 0 <= high, 1 < c.
    """
    if not (0 <= clip_ratio_low <= 1 and clip_ratio_high >= 0 and clip_ratio_c > 1):
        raise ConfigError(
            "the vanilla policy loss needs 0 <= clip_ratio_low <= 1, clip_ratio_high >= 0 and clip_ratio_c > 1, "
            f"not {clip_ratio_low}, {clip_ratio_high} and {clip_ratio_c}"
        )
    advantages = zero_outside(advantages, response_mask)
    log_ratio = zero_outside(log_prob - old_log_prob, response_mask).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = log_ratio.exp()

    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    bound = -advantages * clip_ratio_c
    is_clipped = clipped > unclipped
    loss = torch.where(is_clipped, clipped, unclipped)
    is_bounded = (advantages < 0) & (loss > bound)
    loss = torch.where(is_bounded, bound, loss)
    return loss, {
        "pg_clipfrac": is_clipped.to(loss.dtype),
        "pg_clipfrac_lower": is_bounded.to(loss.dtype),
        "ppo_kl": -log_ratio.detach(),
    }
