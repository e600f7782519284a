"""Losses as the engines call them: an algorithm, the config's values, and the mini-batch's denominators bound together."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators, agg_loss
from lockstep.algorithms.kl import kl_penalty
from lockstep.algorithms.masked import masked_sum, zero_outside
from lockstep.algorithms.policy_losses import bind_policy_loss, get_policy_loss, loss_inputs
from lockstep.algorithms.rows import Rows
from lockstep.algorithms.value_losses import clipped_value_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.critic import CriticConfig
from lockstep.observability.metrics import Mean, Metric
from lockstep.protocol import DataProto
from lockstep.utils.files import load_reference
from lockstep.workers.engine.base import LossFn, TokenOutputs
from lockstep.workers.engine.pending import Pending, all_finite, pending_max, pending_mean, pending_sum


def make_policy_loss(config: ActorConfig, denominators: Denominators, loss_scale_factor: float) -> LossFn:
    """pg_loss - entropy_coeff * entropy + kl_loss_coef * KL to the reference; every term aggregated the same way.

    pg_loss is weighted by the column rollout_is_weights where the batch has it; the other terms are not.

    Reads the columns response_mask, old_log_probs, advantages, with use_kl_loss ref_log_prob, and those that the policy loss
    names. Without old_log_probs the rows are the only update of their batch, and what it computes is what the policy was before it.
    With rollout_log_probs the metrics sampler/* say how far the sampler was off.

    Reading its metrics raises NumericalError, naming dataset rows, when a log-prob or a token's loss is not finite.
    """
    mode = config.policy_loss.loss_mode
    policy_loss = load_reference(mode) or get_policy_loss(mode)
    # The sampler's log-probs are here to be compared with, in some updates only: no loss may come to depend on them.
    names = [name for name in loss_inputs(policy_loss) if name != "rollout_log_probs"]

    def loss_fn(outputs: TokenOutputs, rows: DataProto) -> tuple[Tensor, dict[str, Metric | Pending]]:
        assert outputs.log_probs is not None
        assert outputs.entropy is not None
        mask = rows.batch["response_mask"].bool()
        old_log_probs = rows.batch["old_log_probs"] if "old_log_probs" in rows else outputs.log_probs.detach()

        def aggregate(loss_mat: Tensor) -> Tensor:
            return agg_loss(loss_mat, mask, config.loss_agg_mode, denominators, loss_scale_factor)

        metrics: dict[str, Metric | Pending] = {"check/log_probs": _finite("log-probs", outputs.log_probs, mask, rows)}
        columns = {name: rows.batch[name] for name in names if name in rows.columns}
        own = {"old_log_prob": old_log_probs, "log_prob": outputs.log_probs, "response_mask": mask}
        loss_mat, token_metrics = bind_policy_loss(policy_loss, config.loss_parameters)(columns | own, Rows.of_padded(mask))
        if "rollout_is_weights" in rows:
            loss_mat = loss_mat * zero_outside(rows.batch["rollout_is_weights"], mask)
        metrics["check/policy_loss"] = _finite("policy loss", loss_mat, mask, rows)
        loss = aggregate(loss_mat)
        metrics["actor/pg_loss"] = pending_sum(loss)
        if config.entropy_coeff:
            entropy_loss = aggregate(outputs.entropy)
            loss = loss - config.entropy_coeff * entropy_loss
            metrics["actor/entropy_loss"] = pending_sum(entropy_loss)
        if config.use_kl_loss:
            log_probs, ref_log_probs = (zero_outside(x, mask) for x in (outputs.log_probs, rows.batch["ref_log_prob"]))
            kl_loss = aggregate(kl_penalty(log_probs, ref_log_probs, config.kl_loss_type))
            loss = loss + config.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = pending_sum(kl_loss)
            metrics["actor/kl_coef"] = Mean(config.kl_loss_coef)
        metrics["actor/loss"] = pending_sum(loss)
        metrics["actor/entropy"] = token_mean(outputs.entropy, mask)
        metrics |= {f"actor/{name}": token_mean(values, mask) for name, values in token_metrics.items()}
        metrics["actor/ratio_mean"] = token_mean(torch.exp(outputs.log_probs.detach() - old_log_probs), mask)
        metrics["actor/log_ratio_max"] = _largest((outputs.log_probs - old_log_probs).abs(), mask)
        if "rollout_log_probs" in rows:
            metrics |= _against_sampler(outputs.log_probs.detach(), rows.batch["rollout_log_probs"], mask)
        return loss, metrics

    return loss_fn


def make_value_loss(config: CriticConfig, denominators: Denominators) -> LossFn:
    """The clipped squared error of the values. Reads the columns response_mask, values and returns."""

    def loss_fn(outputs: TokenOutputs, rows: DataProto) -> tuple[Tensor, dict[str, Metric | Pending]]:
        assert outputs.values is not None
        mask = rows.batch["response_mask"].bool()
        metrics: dict[str, Metric | Pending] = {"check/values": _finite("values", outputs.values, mask, rows)}
        loss_mat, token_metrics = clipped_value_loss(
            vpreds=outputs.values,
            values=rows.batch["values"],
            returns=rows.batch["returns"],
            response_mask=mask,
            cliprange_value=config.cliprange_value,
        )
        loss = agg_loss(loss_mat, mask, config.loss_agg_mode, denominators)
        metrics["critic/vf_loss"] = pending_sum(loss)
        metrics["critic/vpred_mean"] = token_mean(outputs.values, mask)
        metrics |= {f"critic/{name}": token_mean(values, mask) for name, values in token_metrics.items()}
        return loss, metrics

    return loss_fn


def token_mean(values: Tensor, mask: Tensor) -> Pending:
    """The mean over unmasked tokens, as a metric that merges exactly."""
    return pending_mean(masked_sum(values.detach(), mask), mask.sum())


def _against_sampler(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Metric | Pending]:
    """What stages.update_actor makes training/rollout_* of: ratios and differences of the two probabilities of each token."""
    ratio, difference = torch.exp(log_probs - rollout_log_probs), (log_probs.exp() - rollout_log_probs.exp()).abs()
    return {
        "sampler/log_ratio_max": _largest((log_probs - rollout_log_probs).abs(), mask),
        "sampler/ratio": token_mean(ratio, mask),
        "sampler/ratio_square": token_mean(ratio.square(), mask),
        "sampler/difference_max": _largest(difference, mask),
        "sampler/difference": token_mean(difference, mask),
        "sampler/difference_square": token_mean(difference.square(), mask),
    }


def _finite(name: str, values: Tensor, mask: Tensor, rows: DataProto) -> Pending:
    """A check of the values [B, T] under the mask."""
    return all_finite(name, zero_outside(values, mask), list(rows.non_tensor_batch.get("index", range(len(rows)))))


def _largest(values: Tensor, mask: Tensor) -> Pending:
    return pending_max(torch.where(mask, values.detach(), 0.0).max() if values.numel() else values.new_zeros(()))
