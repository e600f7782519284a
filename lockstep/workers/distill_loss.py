"""The loss of distillation as the engines call it."""

from torch import Tensor

from lockstep.algorithms.aggregation import Denominators
from lockstep.workers.engine.base import TokenOutputs, TokenRows
from lockstep.workers.losses import Loss, Metrics, finite, token_mean


def make_distill_loss(name: str) -> Loss:
    """The divergence from the teacher, its mean over the trained tokens of the mini-batch. Reads the columns response_mask and, of each
    row, is_given.

    The metrics, under `name`: kl, the divergence; agreement, the share of tokens where both have the same most likely one; of given rows
    alone nll and token_accuracy.
    """

    def loss_fn(outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators) -> tuple[Tensor, Metrics]:
        log_probs, divergence, total = outputs.log_probs, outputs.divergence, outputs.divergence_sum
        assert log_probs is not None
        assert divergence is not None
        assert total is not None
        assert outputs.top_log_probs is not None
        assert outputs.agreement is not None
        mask = tokens.columns["response_mask"].bool()
        given = mask & tokens.rows.spread(tokens.row_columns["is_given"]).bool()
        return total / max(denominators.tokens, 1), {
            "check/divergence": finite("divergence", divergence, mask, tokens),
            f"{name}/kl": token_mean(divergence, mask),
            f"{name}/agreement": token_mean(outputs.agreement, mask),
            f"{name}/nll": token_mean(-log_probs, given),
            f"{name}/token_accuracy": token_mean((log_probs >= outputs.top_log_probs).float(), given),
        }

    return loss_fn
