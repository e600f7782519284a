"""Losses in which the tokens of a row share one ratio: the geometric mean of theirs. What they take and return: see the package.

The papers average over rows, which is `loss_agg_mode` seq-mean-token-mean.
"""

import torch
from torch import Tensor

from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.policy_losses.clipped import check_clip_range, clipped_surrogate, token_log_ratio, token_metrics
from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError

_MAX_ROW_LOG_RATIO = 10.0


def gspo(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    rows: Rows,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clip on the ratio of the whole row (Zheng et al., arXiv 2507.18071), in the form that allows A per token.

    ```text
    x_i   = mean_t(log_prob - old_log_prob)                                       over the row's mask
    s_it  = exp(min(sg(x_i) + log_prob - sg(log_prob), 10))                       sg: no gradient
    loss  = max(-A s, -A clip(s, 1 - low, 1 + high))
    ```

    Every token of a row has the value of its row's ratio and the gradient of its own log-prob. A mean over many tokens
    stays near 1, so the ranges that fit are far smaller than vanilla's: the paper's are 3e-4 and 4e-4.

    Raises ConfigError when the clip range is not 0 <= low <= 1, 0 <= high.
    """
    check_clip_range("gspo", clip_ratio_low, clip_ratio_high)
    advantages, log_prob, old_log_prob = (zero_outside(x, response_mask) for x in (advantages, log_prob, old_log_prob))
    row_log_ratio = rows.spread(rows.mean((log_prob - old_log_prob).detach(), response_mask))
    ratio = (row_log_ratio + (log_prob - log_prob.detach())).clamp(max=_MAX_ROW_LOG_RATIO).exp()
    loss, is_clipped = clipped_surrogate(advantages, ratio, clip_ratio_low, clip_ratio_high)
    return loss, token_metrics(token_log_ratio(log_prob, old_log_prob, response_mask), is_clipped)


def geo_mean(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    rows: Rows,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Geometric-mean policy optimisation (Zhao et al., arXiv 2507.20673): tokens are clipped, then averaged to a ratio.

    ```text
    x_it  = clamp(log_prob - old_log_prob, -20, 20)
    y_it  = max(x_it, -low) where A_it < 0, else min(x_it, high)
    loss  = -mean_t(A_it) exp(mean_t(y_it))                      over the row's mask; the same for all its tokens
    ```

    `clip_ratio_low` and `clip_ratio_high` bound the *log*-ratio here; the paper's are 0.4 and 0.4. `pg_clipfrac` is 1
    where y differs from x.

    Raises ConfigError when the clip range is not 0 <= low, 0 <= high.
    """
    if not (clip_ratio_low >= 0 and clip_ratio_high >= 0):
        raise ConfigError(
            "the geo_mean policy loss needs clip_ratio_low and clip_ratio_high of at least 0, "
            f"not {clip_ratio_low} and {clip_ratio_high}: set actor_rollout_ref.actor.clip_ratio_low and clip_ratio_high"
        )
    advantages = zero_outside(advantages, response_mask)
    log_ratio = token_log_ratio(log_prob, old_log_prob, response_mask)
    clipped = torch.where(advantages < 0, log_ratio.clamp(min=-clip_ratio_low), log_ratio.clamp(max=clip_ratio_high))
    row_loss = -rows.mean(advantages, response_mask) * rows.mean(clipped, response_mask).exp()
    loss = zero_outside(rows.spread(row_loss), response_mask)
    return loss, token_metrics(log_ratio, is_clipped=clipped.detach() != log_ratio.detach())
