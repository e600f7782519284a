"""Losses that hold back the tokens which take the most entropy: clip_cov and kl_cov (Cui et al., arXiv 2505.22617).

Where log-prob and advantage are high together, an update makes the policy surer and its entropy fall. With means over
the selected tokens of the *mini-batch*:

```text
cov_it  = (A_it - mean A) (log_prob_it - mean log_prob)
```

Which tokens are chosen depends on all of them, so it is decided once for a mini-batch, before it is cut, from the old
log-probs: `choose_clip_cov` and `choose_kl_cov` are the `prepare` of these losses and write the column `cov_selected`.
"""

import torch
from torch import Tensor

from lockstep.algorithms.kl import absolute
from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.policy_losses.clipped import check_clip_range, clipped_surrogate, token_log_ratio, token_metrics
from lockstep.algorithms.rows import Rows
from lockstep.algorithms.token_numbers import token_numbers
from lockstep.errors import ConfigError


def clip_cov(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    cov_selected: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clip, and no loss at all for a few tokens of high covariance.

    ```text
    loss  = max(-A rho, -A clip(rho, 1 - low, 1 + high)) (1 - cov_selected)
    ```

    `cov_selected` [M] is what `choose_clip_cov` says. `pg_clipfrac` is 1 where the clip changed the loss or the token
    was selected.

    Raises ConfigError when the clip range is not 0 <= low <= 1, 0 <= high.
    """
    check_clip_range("clip_cov", clip_ratio_low, clip_ratio_high)
    advantages = zero_outside(advantages, response_mask)
    selected = zero_outside(cov_selected, response_mask).bool()
    log_ratio = token_log_ratio(log_prob, old_log_prob, response_mask)
    loss, is_clipped = clipped_surrogate(advantages, log_ratio.exp(), clip_ratio_low, clip_ratio_high)
    # Multiplied, not replaced: a loss that is NaN must show.
    return loss * selected.logical_not(), token_metrics(log_ratio, is_clipped | selected)


def choose_clip_cov(
    *,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    row_keys: Tensor,
    rows: Rows,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
    eligible: Tensor | None = None,
) -> dict[str, Tensor]:
    """Of the tokens with clip_cov_lb < cov < clip_cov_ub, max(1, tokens * clip_cov_ratio) by a draw; all if they are fewer.

    Args:
        old_log_prob, advantages, response_mask: [M] of a whole mini-batch.
        row_keys: [B] int64; with the position they are all that the draw depends on.
        eligible: [M], tokens that may be chosen; None means all.

    Returns `cov_selected` [M], 1 or 0. Raises ConfigError when the ratio is not in (0, 1] or the bounds are not in order.
    """
    _check_ratio("clip_cov", "clip_cov_ratio", clip_cov_ratio)
    if not clip_cov_lb < clip_cov_ub:
        raise ConfigError(
            f"the clip_cov policy loss needs clip_cov_lb below clip_cov_ub, not {clip_cov_lb} and {clip_cov_ub}: set "
            "actor_rollout_ref.actor.policy_loss.clip_cov_lb and clip_cov_ub"
        )
    mask = response_mask.bool()
    covariance = _covariance(old_log_prob, advantages, mask)
    candidates = mask & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    if eligible is not None:
        candidates = candidates & eligible.bool()
    count = max(int(clip_cov_ratio * int(mask.sum())), 1)
    return {"cov_selected": _first(candidates, token_numbers(row_keys, rows), count)}


def kl_cov(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ppo_kl_coef: float,
    cov_selected: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """No clip, and a penalty on leaving the old policy for the tokens of the highest covariance.

    ```text
    loss  = -A rho + cov_selected ppo_kl_coef |log_prob - old_log_prob|
    ```

    The log-ratio is kept within -20 and 20; where it is rounding, below 1e-4, its absolute value has no gradient
    (`kl.absolute`). `cov_selected` [M] is what `choose_kl_cov` says. `pg_clipfrac` is 0.

    Raises ConfigError when ppo_kl_coef is negative.
    """
    if not ppo_kl_coef >= 0:
        raise ConfigError(
            f"the kl_cov policy loss needs ppo_kl_coef of at least 0, not {ppo_kl_coef}: set "
            "actor_rollout_ref.actor.policy_loss.ppo_kl_coef"
        )
    log_ratio = token_log_ratio(log_prob, old_log_prob, response_mask)
    penalty = zero_outside(cov_selected, response_mask).bool() * absolute(log_ratio)
    return -zero_outside(advantages, response_mask) * log_ratio.exp() + ppo_kl_coef * penalty, token_metrics(log_ratio)


def choose_kl_cov(
    *, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, row_keys: Tensor, rows: Rows, kl_cov_ratio: float
) -> dict[str, Tensor]:
    """The max(1, tokens * kl_cov_ratio) tokens of the highest covariance; equal ones are drawn as in `choose_clip_cov`.

    Returns `cov_selected` [M], 1 or 0. Raises ConfigError when the ratio is not in (0, 1].
    """
    _check_ratio("kl_cov", "kl_cov_ratio", kl_cov_ratio)
    mask = response_mask.bool()
    covariance = _covariance(old_log_prob, advantages, mask)
    count = max(int(kl_cov_ratio * int(mask.sum())), 1)
    return {"cov_selected": _first(mask, token_numbers(row_keys, rows), count, by=-covariance)}


def _covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return _centred(advantages, mask) * _centred(log_prob, mask)


def _centred(x: Tensor, mask: Tensor) -> Tensor:
    """x less its mean over the mask, float64, 0 outside. The same to the last bit in every order of rows; equal x give 0."""
    x = zero_outside(x.detach().double(), mask)
    values = x[mask]
    if not len(values):
        return x
    below = values - values.max()
    return zero_outside(x - values.max() - below.sort().values.mean(), mask)


def _first(candidates: Tensor, numbers: Tensor, count: int, by: Tensor | None = None) -> Tensor:
    """float32 [M]: 1 at the `count` candidates that come first in the order of `by`, then of `numbers`."""
    places = candidates.nonzero().flatten()
    places = places[numbers[places].argsort(stable=True)]
    if by is not None:
        places = places[by[places].argsort(stable=True)]
    chosen = torch.zeros(len(candidates), device=candidates.device)
    chosen[places[:count]] = 1.0
    return chosen


def _check_ratio(loss: str, key: str, ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise ConfigError(
            f"the {loss} policy loss needs {key} above 0 and at most 1, not {ratio}: set actor_rollout_ref.actor.policy_loss.{key}"
        )
