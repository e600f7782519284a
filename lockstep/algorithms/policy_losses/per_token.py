"""Losses beside PPO's in which each token has a ratio, or a weight, of its own. What they take and return: see the package."""

import torch
from torch import Tensor

from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.policy_losses.clipped import check_clip_range, token_log_ratio, token_metrics
from lockstep.errors import ConfigError


def cispo(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a clipped importance weight (MiniMax-M1, arXiv 2506.13585): a clipped token still learns.

    ```text
    rho   = exp(clamp(log_prob - old_log_prob, -20, 20))
    loss  = -sg(clip(rho, 1 - low, 1 + high)) A log_prob      sg: no gradient
    ```

    The value is no measure of progress, only its gradient means something. `pg_clipfrac` is 1 where rho is outside the
    range, whatever the sign of A.

    Raises ConfigError when the clip range is not 0 <= low <= 1, 0 <= high.
    """
    check_clip_range("cispo", clip_ratio_low, clip_ratio_high)
    log_ratio = token_log_ratio(log_prob, old_log_prob, response_mask)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    advantages = zero_outside(advantages, response_mask)
    log_prob = zero_outside(log_prob, response_mask)
    return -weight * advantages * log_prob, token_metrics(log_ratio, is_clipped=weight != ratio)


def gpg(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain policy gradient, as in group policy gradient (Chu et al., arXiv 2504.02546).

    ```text
    loss  = -A log_prob
    ```

    Right only while the policy is the one that sampled: nothing corrects or limits a second update on the same rows.
    `old_log_prob` is read for the metric alone.
    """
    log_ratio = token_log_ratio(log_prob, old_log_prob, response_mask)
    loss = -zero_outside(advantages, response_mask) * zero_outside(log_prob, response_mask)
    return loss, token_metrics(log_ratio)


def sapo(
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    tau_pos: float,
    tau_neg: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A gate that closes smoothly instead of a clip (SAPO, arXiv 2511.20347).

    ```text
    rho   = exp(clamp(log_prob - old_log_prob, -20, 20))
    loss  = -A sigmoid(tau (rho - 1)) 4 / tau                 tau = tau_pos where A > 0, else tau_neg
    ```

    The gradient is that of -A log_prob at ratio 1 and fades on both sides of it, faster for a larger tau: also for a
    token that moves back towards the old policy. The paper averages over rows (seq-mean-token-mean).

    Raises ConfigError unless both temperatures are positive.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ConfigError(
            f"the sapo policy loss needs tau_pos and tau_neg above 0, not {tau_pos} and {tau_neg}: set "
            "actor_rollout_ref.actor.tau_pos and tau_neg"
        )
    advantages = zero_outside(advantages, response_mask)
    log_ratio = token_log_ratio(log_prob, old_log_prob, response_mask)
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    return -advantages * torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau, token_metrics(log_ratio)


def dro(
    *, old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, dro_beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient with a quadratic pull back to the old policy (DRO, Richemond et al., arXiv 2405.19107).

    ```text
    loss  = -(A log_prob - dro_beta / 2 (log_prob - old_log_prob)^2)
    ```

    No ratio and no clip: the pull alone limits a second update on the same rows. It is not clamped.

    Raises ConfigError unless dro_beta is positive.
    """
    if not dro_beta > 0:
        raise ConfigError(
            f"the dro policy loss needs dro_beta above 0, not {dro_beta}: set actor_rollout_ref.actor.policy_loss.dro_beta"
        )
    difference = zero_outside(log_prob - old_log_prob, response_mask)
    gain = zero_outside(advantages, response_mask) * zero_outside(log_prob, response_mask)
    return dro_beta / 2 * difference.square() - gain, token_metrics(token_log_ratio(log_prob, old_log_prob, response_mask))
