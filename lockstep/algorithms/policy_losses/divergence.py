"""Losses whose trust region is a divergence of probabilities instead of a range of ratios: DPPO (arXiv 2602.04879).

A ratio of 2 is a small step from probability 0.001 and a large one from 0.4. Both losses here let a token learn while
the divergence that its own probability shows, p against p_old, is within a bound, or while the step goes back:

```text
loss  = -A sg(min(rho, c)) log_prob          where the token is inside the region, else 0      sg: no gradient
```

`clip_ratio_low` and `clip_ratio_high` are the bounds (probabilities or nats, not ratios); c is `clip_ratio_c`.
`pg_clipfrac` is 1 outside the region, `pg_clipfrac_lower` 1 where rho is above c inside it. The value is no measure of
progress, only its gradient means something.
"""

import torch
from torch import Tensor

from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.policy_losses.clipped import token_log_ratio, token_metrics
from lockstep.errors import ConfigError

_FLOOR = 1e-8
"""Added to 1 - p, whose logarithm is taken."""


def dppo_tv(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The region is total variation: p - p_old <= high where A > 0, p - p_old >= -low elsewhere.

    Raises ConfigError when a bound is negative or c is not positive.
    """
    _check("dppo_tv", clip_ratio_low, clip_ratio_high, clip_ratio_c)
    p = _probabilities(log_prob, response_mask)
    p_old = _probabilities(old_log_prob, response_mask)
    inside = torch.where(zero_outside(advantages, response_mask) > 0, p - p_old <= clip_ratio_high, p - p_old >= -clip_ratio_low)
    return _within(inside, old_log_prob, log_prob, advantages, response_mask, clip_ratio_c)


def dppo_kl(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The region is the KL of "this token or another": KL <= high or p <= p_old where A > 0, KL <= low or p >= p_old elsewhere.

    ```text
    KL  = p_old (old_log_prob - log_prob) + (1 - p_old) log((1 - p_old + 1e-8) / (1 - p + 1e-8))
    ```

    Raises ConfigError when a bound is negative or c is not positive.
    """
    _check("dppo_kl", clip_ratio_low, clip_ratio_high, clip_ratio_c)
    p = _probabilities(log_prob, response_mask)
    p_old = _probabilities(old_log_prob, response_mask)
    difference = zero_outside(old_log_prob - log_prob.detach(), response_mask)
    kl = p_old * difference + (1 - p_old) * ((1 - p_old + _FLOOR) / (1 - p + _FLOOR)).log()
    rising = (kl <= clip_ratio_high) | (p <= p_old)
    falling = (kl <= clip_ratio_low) | (p >= p_old)
    inside = torch.where(zero_outside(advantages, response_mask) > 0, rising, falling)
    return _within(inside, old_log_prob, log_prob, advantages, response_mask, clip_ratio_c)


def _within(
    inside: Tensor, old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, c: float
) -> tuple[Tensor, dict[str, Tensor]]:
    mask = response_mask.bool()
    log_ratio = token_log_ratio(log_prob, old_log_prob, response_mask)
    ratio = log_ratio.detach().exp()
    # Multiplied, not replaced: a log-prob that is NaN must show, although no comparison with it holds.
    loss = -zero_outside(advantages, mask) * ratio.clamp(max=c) * zero_outside(log_prob, mask) * inside
    return loss, token_metrics(log_ratio, is_clipped=mask & ~inside, is_bounded=mask & inside & (ratio > c))


def _probabilities(log_prob: Tensor, response_mask: Tensor) -> Tensor:
    return zero_outside(log_prob.detach(), response_mask).clamp(max=0).exp()


def _check(loss: str, low: float, high: float, c: float) -> None:
    if not (low >= 0 and high >= 0 and c > 0):
        raise ConfigError(
            f"the {loss} policy loss needs clip_ratio_low and clip_ratio_high of at least 0 and clip_ratio_c above 0, not "
            f"{low}, {high} and {c}: set them in actor_rollout_ref.actor"
        )
