"""What must hold for every estimator and every loss, also for those added later: batching never changes the maths.

The properties are those of `lockstep.tools.check`: right padding, the order of the rows, rows without a token, and garbage under the mask
change no result; the parts of a split mini-batch add up to the whole, in value and in gradient. A new estimator or policy loss is
covered as soon as it is registered.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algorithms.advantages import ADV_ESTIMATORS
from lockstep.algorithms.kl import kl_penalty
from lockstep.algorithms.masking import zero_outside
from lockstep.algorithms.policy_losses import POLICY_LOSSES
from lockstep.algorithms.value_losses import clipped_value_loss
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.tools.check.cases import advantage_cases, loss_cases
from lockstep.tools.check.properties import ADVANTAGE_PROPERTIES, ADVANTAGE_WARNINGS, LOSS_PROPERTIES
from lockstep.tools.check.subjects import AdvantageSubject, LossSubject

pytestmark = pytest.mark.slow

PROPERTY = settings(max_examples=30, deadline=None)
# Shares and bounds with which the small batches here have several tokens selected.
PARAMETERS = ActorConfig().loss_parameters | {
    "clip_ratio_high": 0.3,
    "clip_cov_ratio": 0.4,
    "clip_cov_lb": -0.5,
    "kl_cov_ratio": 0.4,
}


def value_loss(*, log_prob, old_log_prob, advantages, response_mask):
    inputs = {"vpreds": log_prob, "values": old_log_prob, "returns": advantages, "response_mask": response_mask}
    return clipped_value_loss(**inputs, cliprange_value=0.5)


def kl_loss(kind):
    def loss(*, log_prob, old_log_prob, response_mask):
        return kl_penalty(zero_outside(log_prob, response_mask), zero_outside(old_log_prob, response_mask), kind), {}

    return loss


LOSSES = {
    **{f"policy-{name}": loss for name, loss in POLICY_LOSSES.items()},
    "value": value_loss,
    **{f"kl-{kind}": kl_loss(kind) for kind in ("k1", "abs", "k2", "k3", "k3+")},
}


@pytest.mark.parametrize("name", sorted(LOSSES))
@PROPERTY
@given(case=loss_cases())
def test_a_loss_has_every_property(name, case):
    subject = LossSubject(LOSSES[name], PARAMETERS)
    for check in LOSS_PROPERTIES.values():
        check(subject, case)


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATORS))
@PROPERTY
@given(case=advantage_cases(), normalise=st.booleans())
def test_an_estimator_has_every_property(name, case, normalise):
    parameters = {"gamma": 0.9, "lam": 0.8, "norm_adv_by_std_in_grpo": normalise}
    for check in (ADVANTAGE_PROPERTIES | ADVANTAGE_WARNINGS).values():
        check(AdvantageSubject(ADV_ESTIMATORS[name], parameters), case)
