"""Policy losses: from log-probs and advantages to a loss per token.

A policy loss returns the loss matrix, which `aggregation.agg_loss` turns into a number, and metrics per token, which
the caller averages over the mask. Keeping both per token is what makes them independent of how the rows are batched.

```text
per_token     each token has a weight of its own: vanilla, cispo, gpg
per_sequence  the tokens of a row share one ratio: gspo, geo_mean
ratio         the log-ratio, the clip and the metrics, which both use
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from lockstep.algorithms.policy_losses.per_sequence import geo_mean, gspo
from lockstep.algorithms.policy_losses.per_token import cispo, gpg, vanilla
from lockstep.algorithms.registry import registering, unknown_name


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
        A loss ignores those of the three that its docstring does not name.

    Returns:
        The loss per token [B, T], and detached metrics per token, each [B, T]. All are 0 outside the mask. Every loss
        here has the same three metrics, so that runs can be compared:

        pg_clipfrac        1 where the clip changed the loss (for cispo: the weight; for geo_mean: the log-ratio)
        pg_clipfrac_lower  1 where the dual clip did; 0 in every loss that has none
        ppo_kl             old_log_prob - log_prob, within -20 and 20: the k1 estimate of KL(old || new)
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


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": gpg,
    "geo_mean": geo_mean,
}
"""Name -> loss: the values of `actor.policy_loss.loss_mode`."""


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Make the decorated function the policy loss `name`; ConfigError when the name is taken."""
    return registering("policy loss", POLICY_LOSSES, name)


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss registered as `name`; ConfigError when there is none."""
    if name not in POLICY_LOSSES:
        raise unknown_name("policy loss", name, POLICY_LOSSES)
    return POLICY_LOSSES[name]
