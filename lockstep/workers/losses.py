"""Losses of tokens as engines call them: an algorithm with the config's values, bound once. Each mini-batch has its own denominators."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lockstep.algorithms.advantages.scan import gae_returns
from lockstep.algorithms.aggregation import Denominators, agg_loss
from lockstep.algorithms.binding import read_loss
from lockstep.algorithms.kl import kl_penalty
from lockstep.algorithms.masking import masked_sum, zero_outside
from lockstep.algorithms.policy_losses import bind_policy_loss, get_policy_loss
from lockstep.algorithms.value_losses import clipped_value_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.critic import CriticConfig
from lockstep.models.chunked_head import LossFn, LossOutput, TokenLoss, TokenOutputs
from lockstep.models.packing import TokenRows
from lockstep.observability.metrics import Mean
from lockstep.utils.files import load_reference
from lockstep.workers.engine.pending import Check, Metrics, Pending, all_finite, pending_max, pending_mean, pending_sum


class LossFunction(Protocol):
    """A LossFn that also takes the denominators of the mini-batch."""

    def __call__(self, outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators) -> LossOutput: ...


@dataclass(frozen=True)
class Loss:
    """A loss with the config's values bound."""

    function: LossFunction
    by_token: bool = False
    """Whether it looks at tokens alone, so that it may be called with parts of rows."""

    def of(self, denominators: Denominators) -> LossFn:
        """Return the loss of a mini-batch with these denominators, as engines call it."""
        bound = partial(self.function, denominators=denominators)
        return TokenLoss(bound) if self.by_token else bound


def make_policy_loss(config: ActorConfig, loss_scale_factor: float) -> Loss:
    """pg_loss - entropy_coeff * entropy + kl_loss_coef * KL to the reference; every term aggregated the same way.

    pg_loss is weighted by the column rollout_is_weights where the batch has it; the other terms are not.

    Reads the columns response_mask, old_log_probs, advantages, with use_kl_loss ref_log_prob, and those that the policy loss
    names. Without old_log_probs the rows are the only update of their batch, and what it computes is what the policy was before it.
    With rollout_log_probs the metrics sampler/* say how far the sampler was off.

    Reading its metrics raises NumericalError, naming dataset rows, when a log-prob or a token's loss is not finite.
    """
    mode = config.policy_loss.loss_mode
    policy_loss = bind_policy_loss(load_reference(mode) or get_policy_loss(mode), config.loss_parameters)

    aggregate = partial(agg_loss, mode=config.loss_agg_mode, loss_scale_factor=loss_scale_factor)

    def loss_fn(outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators) -> LossOutput:
        log_probs = outputs.log_probs
        entropy = outputs.entropy
        assert log_probs is not None
        assert entropy is not None
        columns = tokens.columns
        rows = tokens.rows
        mask = columns["response_mask"].bool()
        old_log_probs = columns.get("old_log_probs", log_probs.detach())
        # The sampler's log-probs are here to be compared with, in some updates only: no loss may come to depend on them.
        given = {name: column for name, column in columns.items() if name != "rollout_log_probs"}
        given |= {"old_log_prob": old_log_probs, "log_prob": log_probs, "response_mask": mask}
        result = policy_loss.function(**policy_loss.arguments(given, rows))
        token_loss, token_metrics = read_loss(policy_loss, result, log_probs)
        if "rollout_is_weights" in columns:
            token_loss = token_loss * zero_outside(columns["rollout_is_weights"], mask)
        of_tokens = partial(aggregate, mask=mask, denominators=denominators, rows=rows)
        loss = of_tokens(token_loss)
        checks = [finite("log-probs", log_probs, mask, tokens), finite("policy loss", token_loss, mask, tokens)]
        metrics: Metrics = {"actor/pg_loss": pending_sum(loss)}
        if config.entropy_coeff:
            entropy_loss = of_tokens(entropy)
            loss = loss - config.entropy_coeff * entropy_loss
            metrics["actor/entropy_loss"] = pending_sum(entropy_loss)
        if config.use_kl_loss:
            own, reference = (zero_outside(x, mask) for x in (log_probs, columns["ref_log_prob"]))
            kl_loss = of_tokens(kl_penalty(own, reference, config.kl_loss_type))
            loss = loss + config.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = pending_sum(kl_loss)
            metrics["actor/kl_coef"] = Mean(config.kl_loss_coef)
        metrics["actor/loss"] = pending_sum(loss)
        metrics["actor/entropy"] = token_mean(entropy, mask)
        metrics |= {f"actor/{name}": token_mean(values, mask) for name, values in token_metrics.items()}
        metrics["actor/ratio_mean"] = token_mean(torch.exp(log_probs.detach() - old_log_probs), mask)
        metrics["actor/log_ratio_max"] = _largest((log_probs - old_log_probs).abs(), mask)
        if "rollout_log_probs" in columns:
            metrics |= _against_sampler(log_probs.detach(), columns["rollout_log_probs"], mask)
        return LossOutput(loss, metrics, checks)

    return Loss(loss_fn, by_token=not policy_loss.takes_rows and config.loss_agg_mode != "seq-mean-token-mean")


def token_mean(values: Tensor, mask: Tensor) -> Pending:
    """The mean over unmasked tokens, as a metric that merges exactly."""
    return pending_mean(masked_sum(values.detach(), mask), mask.sum())


def _against_sampler(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Metrics:
    """What stages.update_actor makes training/rollout_* of: ratios and differences of the two probabilities of each token."""
    ratio = torch.exp(log_probs - rollout_log_probs)
    difference = (log_probs.exp() - rollout_log_probs.exp()).abs()
    return {
        "sampler/log_ratio_max": _largest((log_probs - rollout_log_probs).abs(), mask),
        "sampler/ratio": token_mean(ratio, mask),
        "sampler/ratio_square": token_mean(ratio.square(), mask),
        "sampler/difference_max": _largest(difference, mask),
        "sampler/difference": token_mean(difference, mask),
        "sampler/difference_square": token_mean(difference.square(), mask),
    }


def finite(name: str, values: Tensor, mask: Tensor, tokens: TokenRows) -> Check:
    """Return a check of the values [M] under the mask."""
    return all_finite(name, zero_outside(values, mask), tokens.rows, tokens.indices)


def _largest(values: Tensor, mask: Tensor) -> Pending:
    """The largest value (none is below 0) over unmasked tokens; no metric where there are none."""
    largest = torch.where(mask, values.detach(), 0.0).max() if values.numel() else values.new_zeros(())
    return pending_max(largest, mask.sum())


def make_value_loss(config: CriticConfig) -> Loss:
    """The clipped squared error of the values. Reads the columns response_mask, values and returns."""

    def loss_fn(outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators) -> LossOutput:
        assert outputs.values is not None
        columns = tokens.columns
        mask = tokens.columns["response_mask"].bool()
        checks = [finite("values", outputs.values, mask, tokens)]
        token_loss, token_metrics = clipped_value_loss(
            vpreds=outputs.values,
            values=columns["values"],
            returns=columns["returns"],
            response_mask=mask,
            cliprange_value=config.cliprange_value,
        )
        loss = agg_loss(token_loss, mask, config.loss_agg_mode, denominators, tokens.rows)
        metrics: Metrics = {"critic/vf_loss": pending_sum(loss), "critic/vpred_mean": token_mean(outputs.values, mask)}
        metrics |= {f"critic/{name}": token_mean(values, mask) for name, values in token_metrics.items()}
        return LossOutput(loss, metrics, checks)

    return Loss(loss_fn)


class FreshLoss(Protocol):
    """An engine's LossFn once the first two arguments and a mini-batch's denominators are given."""

    def __call__(
        self,
        seen: list[Tensor],
        discounts: tuple[float, float],
        outputs: TokenOutputs,
        tokens: TokenRows,
        denominators: Denominators,
    ) -> LossOutput: ...


def make_fresh_value_loss(value_loss: Loss) -> FreshLoss:
    """`value_loss` for rows that were not valued before: what the critic says now is both its old values and what returns are made of,
    by GAE with gamma and lam (`discounts`). Reads the columns response_mask and token_level_rewards. The values are added to `seen`."""

    def loss_fn(
        seen: list[Tensor], discounts: tuple[float, float], outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators
    ) -> LossOutput:
        assert outputs.values is not None
        values = outputs.values.detach()
        columns = tokens.columns
        seen.append(values)
        returns = gae_returns(columns["token_level_rewards"], values, columns["response_mask"].bool(), tokens.rows, *discounts)
        return value_loss.function(outputs, replace(tokens, columns=columns | {"values": values, "returns": returns}), denominators)

    return loss_fn


def make_sft_loss(name: str) -> Loss:
    """The negative log-likelihood of the trained tokens, its mean over the mini-batch. Reads the column response_mask.

    The metrics, under `name`: nll; token_accuracy, the share of tokens that are the most likely one; entropy.
    """

    def loss_fn(outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators) -> LossOutput:
        log_probs = outputs.log_probs
        entropy = outputs.entropy
        top = outputs.top_log_probs
        assert log_probs is not None
        assert entropy is not None
        assert top is not None
        mask = tokens.columns["response_mask"].bool()
        loss = agg_loss(-log_probs, mask, "token-mean", denominators, tokens.rows)
        metrics: Metrics = {
            f"{name}/nll": token_mean(-log_probs, mask),
            f"{name}/token_accuracy": token_mean((log_probs >= top).float(), mask),
            f"{name}/entropy": token_mean(entropy, mask),
        }
        return LossOutput(loss, metrics, [finite("log-probs", log_probs, mask, tokens)])

    return Loss(loss_fn, by_token=True)


def make_distill_loss(name: str) -> Loss:
    """The divergence from the teacher, its mean over the trained tokens of the mini-batch. Reads the columns response_mask and, of each
    row, is_given.

    The metrics, under `name`: kl, the divergence; agreement, the share of tokens where both have the same most likely one; of given rows
    alone nll and token_accuracy.
    """

    def loss_fn(outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators) -> LossOutput:
        log_probs = outputs.log_probs
        divergence = outputs.divergence
        total = outputs.divergence_sum
        assert log_probs is not None
        assert divergence is not None
        assert total is not None
        assert outputs.top_log_probs is not None
        assert outputs.agreement is not None
        mask = tokens.columns["response_mask"].bool()
        given = mask & tokens.rows.spread(tokens.row_columns["is_given"]).bool()
        metrics: Metrics = {
            f"{name}/kl": token_mean(divergence, mask),
            f"{name}/agreement": token_mean(outputs.agreement, mask),
            f"{name}/nll": token_mean(-log_probs, given),
            f"{name}/token_accuracy": token_mean((log_probs >= outputs.top_log_probs).float(), given),
        }
        return LossOutput(total / max(denominators.tokens, 1), metrics, [finite("divergence", divergence, mask, tokens)])

    return Loss(loss_fn)
