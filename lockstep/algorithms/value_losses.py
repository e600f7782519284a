"""The critic's loss per token."""

import torch
from torch import Tensor

from lockstep.algorithms.masking import zero_outside


def clipped_value_loss(
    *, vpreds: Tensor, values: Tensor, returns: Tensor, response_mask: Tensor, cliprange_value: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error of the prediction, or of the prediction kept near the old value, whichever is worse.

    ```text
    loss = 0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)
    ```

    Args:
        vpreds: v [M], what the critic says now; the gradient flows here.
        values: v_old [M], what it said before the update.
        returns: R [M].
        response_mask: [M]; outside it nothing is read.
        cliprange_value: c.

    Returns:
        The loss per token [M], for `aggregation.agg_loss`, and the metrics per token: `vf_clipfrac` [M] is 1
        where the clipped error is strictly larger. Both are 0 outside the mask.
    """
    vpreds, values, returns = (zero_outside(x, response_mask) for x in (vpreds, values, returns))
    unclipped = (vpreds - returns).square()
    clipped = (vpreds.clamp(values - cliprange_value, values + cliprange_value) - returns).square()
    is_clipped = clipped > unclipped
    loss = 0.5 * torch.where(is_clipped, clipped, unclipped)
    return loss, {"vf_clipfrac": is_clipped.to(loss.dtype)}
