"""Preference losses against TRL's numbers (trl.json), formulas written out in plain Python, and the values at the start of training."""

import json
import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings

from lockstep.algorithms.preference_losses import (
    NLL_COEF,
    PREFERENCE_LOSSES,
    PREPARATIONS,
    bind_preference_loss,
    bind_preference_prepare,
    get_preference_loss,
    missing_numbers,
    needs_reference,
    register_preference_loss,
    takes_pairs,
)
from lockstep.errors import ConfigError
from lockstep.tools.check.cases import pair_cases
from lockstep.tools.check.properties import PAIR_PROPERTIES
from lockstep.tools.check.subjects import PreferenceSubject

TRL = json.loads((Path(__file__).parent / "trl.json").read_text())
COLUMNS = {name: torch.tensor(TRL[name], dtype=torch.float64) for name in ("log_prob", "ref_log_prob", "length")}
PAIRED = [name for name, loss in PREFERENCE_LOSSES.items() if takes_pairs(loss)]


def loss_of(name, columns, **numbers):
    return bind_preference_loss(get_preference_loss(name), numbers)(columns, None)


@pytest.mark.parametrize("name", PAIRED)
def test_a_loss_is_trls_with_its_defaults(name):
    # TRL computes orpo in float32.
    loss, _ = loss_of(name, COLUMNS)
    torch.testing.assert_close(loss, torch.tensor(TRL["losses"][name], dtype=torch.float64), rtol=1e-6, atol=1e-7)


def test_kto_is_trls():
    rows = {name: x.flatten() for name, x in COLUMNS.items()} | {"is_chosen": torch.tensor([True, False] * 5)}
    rows |= {name: torch.tensor(TRL[name], dtype=torch.float64) for name in ("mismatched_log_prob", "mismatched_ref_log_prob")}
    kto = get_preference_loss("kto")
    prepared = bind_preference_prepare(kto, {})(rows, None)
    loss, _ = loss_of("kto", rows | prepared, undesirable_weight=1.5)
    assert prepared["kl"].tolist() == pytest.approx([TRL["kto"]["kl"]] * 10, rel=1e-12)
    # TRL's losses are float64 here: its labels and log-probs are.
    assert loss.mean().item() == pytest.approx(TRL["kto"]["loss"], rel=1e-12)
    below = {**rows, "mismatched_log_prob": rows["mismatched_ref_log_prob"] - 1}
    assert bind_preference_prepare(kto, {})(below, None)["kl"].tolist() == [0.0] * 10


def plain(name, own, ref, n, beta):
    """The loss of a pair in Python's floats."""

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    h = [a - b for a, b in zip(own, ref, strict=True)]
    mean, mean_h = ([x / m for x, m in zip(values, n, strict=True)] for values in (own, h))
    d, d_mean = h[0] - h[1], mean_h[0] - mean_h[1]
    e = 0.1
    odds = [x - math.log(1 - math.exp(x)) for x in mean]
    return {
        "sigmoid": lambda: -math.log(sigmoid(beta * d)),
        "smoothed": lambda: -(1 - e) * math.log(sigmoid(beta * d)) - e * math.log(sigmoid(-beta * d)),
        "robust": lambda: (-(1 - e) * math.log(sigmoid(beta * d)) + e * math.log(sigmoid(-beta * d))) / (1 - 2 * e),
        "hinge": lambda: max(0.0, 1 - beta * d),
        "ipo": lambda: (d_mean - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": lambda: -math.log(sigmoid(beta * d_mean)),
        "cpo": lambda: -math.log(sigmoid(beta * (own[0] - own[1]))),
        "simpo": lambda: -math.log(sigmoid(beta * (mean[0] - mean[1]) - 0.5 * beta)),
        "orpo": lambda: -beta * math.log(sigmoid(odds[0] - odds[1])),
    }[name]()


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("beta", [0.05, 0.5])
def test_a_loss_is_its_formula(name, beta):
    loss, _ = loss_of(name, COLUMNS, beta=beta)
    pairs = zip(*(COLUMNS[column].tolist() for column in ("log_prob", "ref_log_prob", "length")), strict=True)
    assert loss.tolist() == pytest.approx([plain(name, *pair, beta) for pair in pairs], rel=1e-12)


def test_the_start_of_training_is_known():
    same = {**COLUMNS, "ref_log_prob": COLUMNS["log_prob"]}
    for name in ("sigmoid", "smoothed", "sigmoid_norm"):
        assert loss_of(name, same)[0].tolist() == pytest.approx([math.log(2)] * 5, abs=1e-12)
    assert loss_of("robust", same)[0].tolist() == pytest.approx([math.log(2)] * 5, abs=1e-12)
    assert loss_of("hinge", same)[0].tolist() == [1.0] * 5
    for beta in (0.1, 0.25):
        assert loss_of("ipo", same, beta=beta)[0].tolist() == pytest.approx([1 / (4 * beta**2)] * 5, rel=1e-12)
    rows = {name: x.flatten() for name, x in same.items()} | {"is_chosen": torch.arange(10) % 3 == 0, "kl": torch.zeros(10)}
    assert loss_of("kto", rows)[0].tolist() == [0.5] * 10


def test_rewards_are_what_the_loss_compares():
    h = COLUMNS["log_prob"] - COLUMNS["ref_log_prob"]
    expected = {
        "sigmoid": 0.1 * h,
        "ipo": 0.1 * h / COLUMNS["length"],
        "cpo": 0.1 * COLUMNS["log_prob"],
        "simpo": 2.0 * COLUMNS["log_prob"] / COLUMNS["length"],
    }
    for name, rewards in expected.items():
        torch.testing.assert_close(loss_of(name, COLUMNS)[1], rewards)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@settings(max_examples=25, deadline=None)
@given(case=pair_cases())
def test_a_loss_has_every_property(name, case):
    for check in PAIR_PROPERTIES.values():
        check(PreferenceSubject(PREFERENCE_LOSSES[name], {}), case)


def test_what_a_loss_needs_is_known_from_its_names():
    free = [name for name, loss in PREFERENCE_LOSSES.items() if not needs_reference(loss)]
    assert free == ["cpo", "simpo", "orpo"]
    assert [name for name in PREFERENCE_LOSSES if name not in PAIRED] == ["kto"]
    assert {loss.__name__ for loss in NLL_COEF} == {"cpo", "orpo"}
    with pytest.raises(ConfigError, match="'sigmoid' needs ref_log_prob, which this run does not have"):
        loss_of("sigmoid", {"log_prob": COLUMNS["log_prob"]})
    with pytest.raises(ConfigError, match="unknown preference loss 'simop'; did you mean 'simpo'"):
        get_preference_loss("simop")


@pytest.mark.parametrize("name", ["smoothed", "robust"])
@pytest.mark.parametrize("share", [-0.1, 0.5, math.nan])
def test_a_share_of_wrong_labels_is_below_a_half(name, share):
    with pytest.raises(ConfigError, match=f"{name} preference loss needs a label_smoothing"):
        loss_of(name, COLUMNS, label_smoothing=share)


@patch.dict(PREFERENCE_LOSSES)
@patch.dict(PREPARATIONS)
def test_a_loss_can_be_added():
    def centre_of(*, is_chosen):
        return {"centre": torch.zeros(is_chosen.shape)}

    @register_preference_loss("mine", prepare=centre_of)
    def mine(*, log_prob, centre, sharpness):
        return (log_prob - centre)[:, 0] * sharpness, log_prob

    assert get_preference_loss("mine") is mine
    assert missing_numbers(mine, {}) == []
    assert missing_numbers(get_preference_loss("sigmoid"), {}) == []
    with pytest.raises(ConfigError, match="already registered"):
        register_preference_loss("mine")(get_preference_loss("sigmoid"))
