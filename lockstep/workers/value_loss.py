"""The critic's loss, as the engines call it."""

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from lockstep.algorithms.advantages.scan import gae_returns
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


class FreshLoss(Protocol):
    """An engine's LossFn once the first two arguments and a mini-batch's denominators are given."""

    def __call__(
        self,
        seen: list[Tensor],
        discounts: tuple[float, float],
        outputs: TokenOutputs,
        tokens: TokenRows,
        denominators: Denominators,
    ) -> tuple[Tensor, Metrics]: ...


def make_fresh_value_loss(value_loss: Loss) -> FreshLoss:
    """`value_loss` for rows that were not valued before: what the critic says now is both its old values and what returns are made of,
    by GAE with gamma and lam (`discounts`). Reads the columns response_mask and token_level_rewards. The values are added to `seen`."""

    def loss_fn(
        seen: list[Tensor], discounts: tuple[float, float], outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        assert outputs.values is not None
        values, columns = outputs.values.detach(), tokens.columns
        seen.append(values)
        returns = gae_returns(columns["token_level_rewards"], values, columns["response_mask"].bool(), tokens.rows, *discounts)
        return value_loss(outputs, replace(tokens, columns=columns | {"values": values, "returns": returns}), denominators)

    return loss_fn
