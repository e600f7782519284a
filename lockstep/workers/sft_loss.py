"""The loss of supervised fine-tuning as the engines call it."""

from torch import Tensor

from lockstep.algorithms.aggregation import Denominators, agg_loss
from lockstep.workers.engine.base import TokenOutputs, TokenRows
from lockstep.workers.losses import Loss, Metrics, finite, token_mean


def make_sft_loss(name: str) -> Loss:
    """The negative log-likelihood of the trained tokens, its mean over the mini-batch. Reads the column response_mask.

    The metrics, under `name`: nll; token_accuracy, the share of tokens that are the most likely one; entropy.
    """

    def loss_fn(outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators) -> tuple[Tensor, Metrics]:
        log_probs, entropy, top = outputs.log_probs, outputs.entropy, outputs.top_log_probs
        assert log_probs is not None
        assert entropy is not None
        assert top is not None
        mask = tokens.columns["response_mask"].bool()
        return agg_loss(-log_probs, mask, "token-mean", denominators, tokens.rows), {
            "check/log_probs": finite("log-probs", log_probs, mask, tokens),
            f"{name}/nll": token_mean(-log_probs, mask),
            f"{name}/token_accuracy": token_mean((log_probs >= top).float(), mask),
            f"{name}/entropy": token_mean(entropy, mask),
        }

    loss_fn.by_token = True  # type: ignore[attr-defined]
    return loss_fn
