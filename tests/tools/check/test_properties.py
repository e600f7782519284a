"""Each property, on one batch by hand: it holds for a good function and catches the one that breaks it."""

import pytest
import torch

from lockstep.algorithms.masking import zero_outside
from lockstep.tools.check.properties import ADVANTAGE_PROPERTIES, ADVANTAGE_WARNINGS, LOSS_PROPERTIES, LOSS_WARNINGS
from lockstep.tools.check.subjects import AdvantageSubject, Case, LossSubject, Violation

NUMBERS = torch.tensor([[0.5, -1.0, 0.25], [1.5, 0.0, -0.75], [0.75, 2.0, 0.5]], dtype=torch.float64)
MASK = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
LOSS_CASE = Case(
    tokens={"old_log_prob": NUMBERS - 1, "advantages": NUMBERS.flip(1), "log_prob": NUMBERS},
    mask=MASK,
    of_rows={"row_keys": torch.tensor([3, 1, 2])},
    mode="token-mean",
    order=[2, 0, 1],
    cut=1,
)
ADVANTAGE_CASE = Case(
    tokens={"token_level_rewards": NUMBERS}, of_rows={"group": torch.tensor([0, 0, 0])}, mask=MASK, order=[1, 2, 0]
)


def good(*, log_prob, old_log_prob, advantages, response_mask):
    ratio = zero_outside(log_prob - old_log_prob, response_mask).exp()
    loss = -zero_outside(advantages, response_mask) * ratio
    return loss, {"ratio": zero_outside(ratio, response_mask).detach()}


def changed(change):
    """`good` with its loss changed."""

    def loss(*, log_prob, old_log_prob, advantages, response_mask):
        plain, metrics = good(log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, response_mask=response_mask)
        return change(plain, log_prob, response_mask), metrics

    return loss


def attached(*, log_prob, response_mask):
    return zero_outside(log_prob, response_mask), {"log_prob": zero_outside(log_prob, response_mask)}


BROKEN_LOSSES = {
    "one number per token": changed(lambda loss, new, mask: loss.mean()),
    "finite": changed(lambda loss, new, mask: loss / zero_outside(new * 0, mask)),
    "masked tokens": changed(lambda loss, new, mask: loss * new.exp()),
    "padding": changed(lambda loss, new, mask: loss / mask.shape[1]),
    "order of rows": changed(lambda loss, new, mask: loss * torch.arange(1, len(mask) + 1)[:, None]),
    "micro-batches and ranks": changed(lambda loss, new, mask: loss / mask.sum().clamp(min=1)),
    "rounding": changed(lambda loss, new, mask: loss + zero_outside(new - (NUMBERS - 1), mask).abs()),
}


def test_there_is_a_broken_loss_for_every_property():
    assert BROKEN_LOSSES.keys() == LOSS_PROPERTIES.keys()


@pytest.mark.parametrize("name", LOSS_PROPERTIES)
def test_a_property_of_losses_holds_for_a_good_one_and_catches_a_broken_one(name):
    LOSS_PROPERTIES[name](LossSubject(good, {}), LOSS_CASE)
    with pytest.raises(Violation):
        LOSS_PROPERTIES[name](LossSubject(BROKEN_LOSSES[name], {}), LOSS_CASE)


def test_metrics_that_carry_a_gradient_are_caught():
    with pytest.raises(Violation, match="detached"):
        LOSS_PROPERTIES["finite"](LossSubject(attached, {}), LOSS_CASE)


def test_a_loss_with_a_pull_of_its_own_gets_a_warning():
    (check,) = LOSS_WARNINGS.values()
    check(LossSubject(good, {}), LOSS_CASE)
    with pytest.raises(Violation, match="every advantage"):
        check(LossSubject(changed(lambda loss, new, mask: loss + zero_outside(new, mask)), {}), LOSS_CASE)


def test_functions_that_name_rows_get_flat_columns_of_rows_that_end_with_their_last_selected_token():
    def flat(*, log_prob, advantages, response_mask, rows):
        seen.append((rows.lengths.tolist(), tuple(log_prob.shape)))
        return -zero_outside(advantages, response_mask) * zero_outside(log_prob, response_mask), {}

    def by_length(*, log_prob, advantages, response_mask, rows):
        loss, metrics = flat(log_prob=log_prob, advantages=advantages, response_mask=response_mask, rows=rows)
        return loss / rows.spread(rows.lengths), metrics

    def score(*, token_level_rewards, response_mask, rows):
        seen.append((rows.lengths.tolist(), tuple(token_level_rewards.shape)))
        scores = zero_outside(rows.spread(rows.sum(zero_outside(token_level_rewards, response_mask))), response_mask)
        return scores, scores

    seen: list = []
    for check in LOSS_PROPERTIES.values():
        check(LossSubject(flat, {}), LOSS_CASE)
    assert ([3, 2, 0], (5,)) in seen
    assert ([5, 5, 5], (15,)) in seen  # masked tokens at the ends, which stand for padding
    with pytest.raises(Violation, match="columns of padding"):
        LOSS_PROPERTIES["padding"](LossSubject(by_length, {}), LOSS_CASE)
    for check in ADVANTAGE_PROPERTIES.values():
        check(AdvantageSubject(score, {}), ADVANTAGE_CASE)
    assert seen[-1] == ([3, 2], (5,))
    with pytest.raises(Violation, match=r"the loss must have one number per token, \(5,\), but has shape \(\)"):
        LOSS_PROPERTIES["one number per token"](LossSubject(lambda *, log_prob, rows: (log_prob.sum(), {}), {}), LOSS_CASE)


def reward_to_go(*, token_level_rewards, response_mask):
    rewards = zero_outside(token_level_rewards, response_mask)
    togo = zero_outside(rewards.flip(1).cumsum(1).flip(1), response_mask)
    return togo, togo


def changed_estimator(change):
    def estimator(*, token_level_rewards, response_mask):
        togo, _ = reward_to_go(token_level_rewards=token_level_rewards, response_mask=response_mask)
        return change(togo, token_level_rewards, response_mask), togo

    return estimator


BROKEN_ESTIMATORS = {
    "one number per token": changed_estimator(lambda togo, rewards, mask: togo.sum(1)),
    "finite": changed_estimator(lambda togo, rewards, mask: togo + 1),
    "masked tokens": changed_estimator(
        lambda togo, rewards, mask: togo + zero_outside(rewards.sum(1, True).expand(mask.shape), mask)
    ),
    "padding": changed_estimator(lambda togo, rewards, mask: togo / mask.shape[1]),
    "order of rows": changed_estimator(lambda togo, rewards, mask: togo * torch.arange(1, len(mask) + 1)[:, None]),
    "empty rows": changed_estimator(lambda togo, rewards, mask: togo / len(mask)),
}


def test_there_is_a_broken_estimator_for_every_property():
    assert BROKEN_ESTIMATORS.keys() == ADVANTAGE_PROPERTIES.keys()


@pytest.mark.parametrize("name", ADVANTAGE_PROPERTIES)
def test_a_property_of_estimators_holds_for_a_good_one_and_catches_a_broken_one(name):
    ADVANTAGE_PROPERTIES[name](AdvantageSubject(reward_to_go, {}), ADVANTAGE_CASE)
    with pytest.raises(Violation):
        ADVANTAGE_PROPERTIES[name](AdvantageSubject(BROKEN_ESTIMATORS[name], {}), ADVANTAGE_CASE)


def to_go(*, token_level_rewards, response_mask, gamma, by_token):
    """Returns that are discounted at every selected token but the last, by a number or by one for each token."""
    rewards, returns = zero_outside(token_level_rewards, response_mask), torch.zeros_like(token_level_rewards)
    discount = gamma if by_token else float(gamma)
    later = torch.zeros(len(rewards), dtype=rewards.dtype)
    for column in reversed(range(rewards.shape[1])):
        own, factor = response_mask[:, column], discount[:, column] if isinstance(discount, torch.Tensor) else discount
        later = torch.where(own, rewards[:, column] + factor * later, later)
        returns[:, column] = zero_outside(later, own)
    return returns, returns


@pytest.mark.parametrize("by_token", [True, False])
def test_an_estimator_that_cannot_discount_by_turn_gets_a_warning(by_token):
    (check,) = ADVANTAGE_WARNINGS.values()
    subject = AdvantageSubject(to_go, {"gamma": 0.5, "by_token": by_token})
    if by_token:
        check(subject, ADVANTAGE_CASE)
    else:
        with pytest.raises(ValueError, match="scalar"):
            check(subject, ADVANTAGE_CASE)
