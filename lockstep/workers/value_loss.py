"""The critic's loss, as the engines call it."""

from torch import Tensor

from lockstep.algorithms.aggregation import Denominators, agg_loss
from lockstep.algorithms.value_losses import clipped_value_loss
from lockstep.config.critic import CriticConfig
from lockstep.workers.engine.base import TokenOutputs, TokenRows
from lockstep.workers.engine.pending import pending_sum
from lockstep.workers.losses import Loss, Metrics, finite, token_mean


def make_value_loss(config: CriticConfig) -> Loss:
    """The clipped squared error of the values. Reads the columns response_mask, values and returns."""

    def loss_fn(outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.values is not None
        columns, mask = tokens.columns, tokens.columns["response_mask"].bool()
        metrics: Metrics = {"check/values": finite("values", outputs.values, mask, tokens)}
        token_loss, token_metrics = clipped_value_loss(
            vpreds=outputs.values,
            values=columns["values"],
            returns=columns["returns"],
            response_mask=mask,
            cliprange_value=config.cliprange_value,
        )
        loss = agg_loss(token_loss, mask, config.loss_agg_mode, denominators, tokens.rows)
        metrics["critic/vf_loss"] = pending_sum(loss)
        metrics["critic/vpred_mean"] = token_mean(outputs.values, mask)
        metrics |= {f"critic/{name}": token_mean(values, mask) for name, values in token_metrics.items()}
        return loss, metrics

    return loss_fn
