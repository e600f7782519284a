"""The loss of a reward model as the engines call it, and what is measured of its scores."""

import torch
from torch import Tensor

from lockstep.algorithms.aggregation import Denominators
from lockstep.algorithms.reward_loss import bradley_terry
from lockstep.algorithms.rows import Rows
from lockstep.workers.engine.base import TokenOutputs, TokenRows
from lockstep.workers.engine.pending import all_finite, pending_mean, pending_sum
from lockstep.workers.losses import Loss, Metrics

NUM_BINS = 10


def make_reward_loss(name: str, center_rewards_coefficient: float) -> Loss:
    """Bradley and Terry's loss as a mean over the pairs of the mini-batch. `name` stands before the names of the metrics.

    The rows are chosen and rejected in turn. Reads the row's column margin. Reading the metrics raises NumericalError, naming dataset
    rows, when a score is not finite. NAME/bin/i are for the calibration: with the confidence sigmoid(|r+ - r-|), from 0.5 to 1 in
    NUM_BINS equal bins, the sum over the pairs in bin i of the confidence less 1 if the larger score is the chosen one's.
    """

    def loss_fn(outputs: TokenOutputs, tokens: TokenRows, denominators: Denominators) -> tuple[Tensor, Metrics]:
        assert outputs.scores is not None
        chosen, rejected = outputs.scores.unflatten(0, (-1, 2)).unbind(-1)
        loss = bradley_terry(chosen, rejected, tokens.row_columns["margin"][::2], center_rewards_coefficient)
        ahead = (chosen - rejected).detach()
        right, count = (ahead.sign() + 1) / 2, torch.ones_like(ahead).sum()
        confidence = ahead.abs().sigmoid()
        bins = ((confidence - 0.5) * 2 * NUM_BINS).long().clamp(0, NUM_BINS - 1)
        excess = torch.zeros(NUM_BINS, device=bins.device).index_add_(0, bins, confidence - right)
        one_each = Rows(torch.ones_like(tokens.rows.lengths), tokens.rows.device)
        return loss.sum() / max(denominators.sequences // 2, 1), {
            "check/scores": all_finite("scores", outputs.scores, one_each, tokens.indices),
            f"{name}/loss": pending_mean(loss.sum(), count),
            f"{name}/accuracy": pending_mean(right.sum(), count),
            f"{name}/margin": pending_mean(ahead.sum(), count),
            f"{name}/chosen_score": pending_mean(chosen.sum(), count),
            f"{name}/rejected_score": pending_mean(rejected.sum(), count),
            **{f"{name}/bin/{i}": pending_sum(excess[i]) for i in range(NUM_BINS)},
        }

    return loss_fn
