"""A loss that is bound once: its numbers, its columns, and what stands between a call and the formula."""

import sys

import pytest
import torch

from lockstep.algorithms.policy_losses import POLICY_LOSSES, bind_policy_loss
from lockstep.algorithms.rows import Rows
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.errors import ConfigError

ROWS = Rows(torch.tensor([2, 0, 1]))
NAMES = ("old_log_prob", "log_prob", "advantages", "response_mask", "cov_selected")


def test_numbers_are_given_once_and_the_others_are_columns_required_or_not():
    def loss(*, log_prob, threshold, weight=2.0, extra=None, rows):
        return log_prob * threshold * weight + (0 if extra is None else extra) + rows.spread(torch.arange(len(rows))), {}

    bound = bind_policy_loss(loss, {"threshold": 3.0, "clip_ratio_low": 0.2, "weight": None})
    assert bound.columns == {"log_prob": True, "threshold": False, "weight": False, "extra": False}
    one = torch.ones(3)
    assert bound({"log_prob": one, "unread": one, "extra": None}, ROWS)[0].tolist() == [6.0, 6.0, 8.0]
    assert bound({"log_prob": one, "extra": one}, ROWS)[0].tolist() == [7.0, 7.0, 9.0]
    # A column that the loss's `prepare` wrote replaces the number of its name.
    assert bound({"log_prob": one, "threshold": 2 * one}, ROWS)[0].tolist() == [4.0, 4.0, 6.0]


def test_a_missing_column_is_named_with_what_the_run_has():
    bound = bind_policy_loss(POLICY_LOSSES["clip_cov"], {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2})
    columns = dict.fromkeys(NAMES[:4], torch.ones(3))
    with pytest.raises(ConfigError) as caught:
        bound(columns | {"ref_log_prob": None}, ROWS)
    assert str(caught.value) == (
        "policy loss 'clip_cov' needs cov_selected, which this run does not have (it has advantages, clip_ratio_high, clip_ratio_low, "
        "log_prob, old_log_prob, response_mask): add it to actor_rollout_ref.actor.policy_loss.loss_kwargs, or give the argument a default"
    )


def test_arguments_without_a_name_are_refused_at_binding():
    with pytest.raises(ConfigError, match=r"'\*blocks'.*given by name"):
        bind_policy_loss(lambda *blocks: (blocks[0], {}), {})


def test_a_loss_that_does_not_name_rows_gets_padded_blocks_and_one_that_does_flat_columns():
    seen = []

    def padded(*, log_prob, response_mask):
        seen.append(log_prob.shape)
        return log_prob * response_mask, {"first": response_mask.cumsum(1)}

    def flat(*, log_prob, rows):
        seen.append(log_prob.shape)
        return log_prob * rows.spread(rows.lengths), {}

    columns = {"log_prob": torch.tensor([1.0, 2.0, 3.0]), "response_mask": torch.ones(3)}
    loss, metrics = bind_policy_loss(padded, {})(columns, ROWS)
    assert (loss.tolist(), metrics["first"].tolist()) == ([1.0, 2.0, 3.0], [1.0, 2.0, 1.0])
    assert bind_policy_loss(flat, {})(columns, ROWS)[0].tolist() == [2.0, 4.0, 3.0]
    assert seen == [(3, 2), (3,)]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_one_frame_lies_between_the_caller_and_a_built_in_formula(name):
    bound = bind_policy_loss(POLICY_LOSSES[name], ActorConfig().loss_parameters)
    columns, frames = dict.fromkeys(NAMES, torch.ones(3)), []

    def watch(frame, event, arg):
        if event == "call" and frame.f_code is POLICY_LOSSES[name].__code__:
            frames.append(frame.f_back.f_back)

    sys.setprofile(watch)
    try:
        bound(columns, ROWS)
    finally:
        sys.setprofile(None)
    assert frames == [sys._getframe()]
    assert bound.takes_rows == (name in ("gspo", "geo_mean"))
