"""Losses of whole responses as engines call them: preferences, and the scores of a reward model.

The engine calls a loss on chunks of whole rows, and never separates the rows of one unit (`DataProto.units`): a pair is a unit, so its two
rows are in one chunk. Logits are still made once, a chunk at a time. A pair with more tokens than may have logits at once is computed like
any such row: log-probs first, and their logits once more in the backward pass.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.masking import masked_sum, zero_outside
from lockstep.algorithms.preference_losses import NLL_COEF, bind_preference_loss, get_preference_loss, takes_pairs
from lockstep.algorithms.reward_loss import bradley_terry
from lockstep.algorithms.rows import Rows
from lockstep.models.chunked_head import LossOutput, TokenOutputs
from lockstep.models.packing import TokenRows
from lockstep.utils.files import load_reference
from lockstep.workers.engine.pending import Metrics, Pending, all_finite, pending_mean, pending_sum
from lockstep.workers.losses import Loss


def make_preference_loss(name: str, mode: str, parameters: Mapping[str, Any], nll_coef: float | None = None) -> Loss:
    """The loss `mode` (a registered name or `file.py:function`) with these of its numbers, and `nll_coef` times the nll of chosen
    responses (None: what suits the loss), as a mean over the pairs of the mini-batch, or over its rows. `name` stands before the names of
    the metrics.

    Reads the columns response_mask, is_chosen, with a reference ref_response_log_prob, and those that the loss names. For a loss of pairs
    the rows are chosen and rejected in turn. Reading its metrics raises NumericalError, naming dataset rows, when a log-prob is not finite.
    """
    function = load_reference(mode) or get_preference_loss(mode)
    bound = bind_preference_loss(function, parameters)
    has_pairs = takes_pairs(function)
    coef = NLL_COEF.get(function, 0.0) if nll_coef is None else nll_coef

    def loss_fn(outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators) -> LossOutput:
        assert outputs.log_probs is not None
        rows = tokens.rows
        mask = tokens.columns["response_mask"].bool()
        # Sums of many tokens lose what the loss is about, their small differences, in float32.
        log_prob = rows.sum(zero_outside(outputs.log_probs, mask).double())
        length = rows.sum(mask).clamp(min=1).double()
        given = {column: x.double() if x.is_floating_point() else x for column, x in tokens.row_columns.items()}
        given |= {"log_prob": log_prob, "length": length}
        if "ref_response_log_prob" in given:
            given["ref_log_prob"] = given["ref_response_log_prob"]
        if has_pairs:
            given = {column: x.unflatten(0, (-1, 2)) for column, x in given.items()}
        loss, rewards = bound(given, None)
        is_chosen = tokens.row_columns["is_chosen"].bool()
        nll = -log_prob / length
        of_chosen = masked_sum(nll, is_chosen)
        total = (loss.sum() + coef * of_chosen) / max(denominators.sequences // (2 if has_pairs else 1), 1)
        metrics: Metrics = {
            f"{name}/loss": pending_mean(loss.sum() + coef * of_chosen, torch.ones_like(loss).sum()),
            f"{name}/nll": pending_mean(of_chosen, is_chosen.sum()),
            f"{name}/accuracy": _accuracy(rewards.detach(), is_chosen, has_pairs),
        }
        measured = {"log_prob": log_prob, "log_prob_mean": -nll, "reward": rewards.flatten()}
        for label, selected in (("chosen", is_chosen), ("rejected", ~is_chosen)):
            metrics |= {
                f"{name}/{label}_{what}": pending_mean(masked_sum(x, selected), selected.sum()) for what, x in measured.items()
            }
        checks = [all_finite("log-probs", zero_outside(outputs.log_probs, mask), rows, tokens.indices)]
        return LossOutput(total.to(outputs.log_probs.dtype), metrics, checks)

    return Loss(loss_fn)


_TIE = 1e-6
"""Rewards that differ by less are equal: before the first update only rounding, about 1e-8, tells the two rows of a pair apart."""


def _accuracy(rewards: Tensor, is_chosen: Tensor, has_pairs: bool) -> Pending:
    """Return the share of pairs whose chosen reward is larger, or of rows whose reward has the sign of its label; ties count half."""
    ahead = rewards[:, 0] - rewards[:, 1] if has_pairs else torch.where(is_chosen, rewards, -rewards)
    right = (torch.where(ahead.abs() < _TIE, 0.0, ahead).sign() + 1) / 2
    return pending_mean(right.sum(), torch.ones_like(right).sum())


NUM_BINS = 10


def make_reward_loss(name: str, center_rewards_coefficient: float) -> Loss:
    """Bradley and Terry's loss as a mean over the pairs of the mini-batch. `name` stands before the names of the metrics.

    The rows are chosen and rejected in turn. Reads the row's column margin. Reading the metrics raises NumericalError, naming dataset
    rows, when a score is not finite. NAME/bin/i are for the calibration: with the confidence sigmoid(|r+ - r-|), from 0.5 to 1 in
    NUM_BINS equal bins, the sum over the pairs in bin i of the confidence less 1 if the larger score is the chosen one's.
    """

    def loss_fn(outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators) -> LossOutput:
        assert outputs.scores is not None
        chosen, rejected = outputs.scores.unflatten(0, (-1, 2)).unbind(-1)
        loss = bradley_terry(chosen, rejected, tokens.row_columns["margin"][::2], center_rewards_coefficient)
        ahead = (chosen - rejected).detach()
        right = (ahead.sign() + 1) / 2
        count = torch.ones_like(ahead).sum()
        confidence = ahead.abs().sigmoid()
        bins = ((confidence - 0.5) * 2 * NUM_BINS).long().clamp(0, NUM_BINS - 1)
        excess = torch.zeros(NUM_BINS, device=bins.device).index_add_(0, bins, confidence - right)
        one_each = Rows(torch.ones_like(tokens.rows.lengths), tokens.rows.device)
        metrics: Metrics = {
            f"{name}/loss": pending_mean(loss.sum(), count),
            f"{name}/accuracy": pending_mean(right.sum(), count),
            f"{name}/margin": pending_mean(ahead.sum(), count),
            f"{name}/chosen_score": pending_mean(chosen.sum(), count),
            f"{name}/rejected_score": pending_mean(rejected.sum(), count),
            **{f"{name}/bin/{i}": pending_sum(excess[i]) for i in range(NUM_BINS)},
        }
        checks = [all_finite("scores", outputs.scores, one_each, tokens.indices)]
        return LossOutput(loss.sum() / max(denominators.sequences // 2, 1), metrics, checks)

    return Loss(loss_fn)
