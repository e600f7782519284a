"""From a loss per token to one number.

Every mode is a sum over rows divided by counts of the *whole* mini-batch, which are known before its first micro-batch.
So the results of micro-batches and ranks are simply added, and how the rows were split changes neither the loss nor its
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lockstep.algorithms.masking import masked_sum
from lockstep.algorithms.registry import unknown_name
from lockstep.algorithms.rows import Rows
from lockstep.errors import ConfigError

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Denominators:
    """What a mini-batch is divided by, counted over all its ranks and micro-batches.

    Example: the masks 1 1 0 of one row and 0 0 of another count as Denominators(tokens=2, sequences=1).
    """

    tokens: int
    """Tokens the policy wrote."""
    sequences: int
    """Rows with at least one such token."""

    @classmethod
    def of(cls, response_mask: Tensor, rows: Rows) -> Denominators:
        """Count the mask [M] of a whole mini-batch."""
        written = rows.sum(response_mask.bool())
        return cls(tokens=int(written.sum()), sequences=int((written > 0).sum()))


def agg_loss(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    denominators: Denominators,
    rows: Rows,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """The share of these rows in the mini-batch's loss.

    With l the loss per token, m the mask, N the counts in `denominators`, and sums over rows i and tokens t:

    ```text
    token-mean               sum_it(m l) / N_tokens
    token-sum                sum_it(m l)
    seq-mean-token-sum       sum_i[ sum_t(m l) ] / N_sequences
    seq-mean-token-mean      sum_i[ sum_t(m l) / sum_t(m) ] / N_sequences
    seq-mean-token-sum-norm  sum_i[ sum_t(m l) ] / (N_sequences * loss_scale_factor)
    ```

    Args:
        loss: [M], per token.
        mask: [M]. Rows without a selected token add nothing.
        denominators: counts of the whole mini-batch, of which these rows are a part. Where a count is 0 the loss is 0.
        rows: the rows of these tokens.
        loss_scale_factor: read by seq-mean-token-sum-norm only, which needs it (a constant length, as in Dr. GRPO).

    Raises:
        ConfigError: the mode is unknown, or its loss_scale_factor is missing or not positive.
    """
    tokens = max(denominators.tokens, 1)
    sequences = max(denominators.sequences, 1)
    match mode:
        case "token-mean":
            return masked_sum(loss, mask) / tokens
        case "token-sum":
            return masked_sum(loss, mask)
        case "seq-mean-token-sum":
            return masked_sum(loss, mask) / sequences
        case "seq-mean-token-mean":
            return rows.mean(loss, mask).sum() / sequences
        case "seq-mean-token-sum-norm":
            if loss_scale_factor is None or not loss_scale_factor > 0:
                raise ConfigError(
                    "loss_agg_mode seq-mean-token-sum-norm divides by loss_scale_factor, which must be positive, "
                    f"not {loss_scale_factor}: set it, for example, to the longest response length"
                )
            return masked_sum(loss, mask) / (sequences * loss_scale_factor)
        case _:
            raise unknown_name("loss_agg_mode", mode, LOSS_AGG_MODES)
