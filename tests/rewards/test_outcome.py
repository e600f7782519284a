from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from lockstep.rewards.outcome import check_score


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1.0",
        float("nan"),
        float("inf"),
        -float("inf"),
        1e39,
        10**400,
        1j,
        [1.0],
        {},
        {"acc": 1},
        {"score": None},
        torch.ones(2),
        np.ones(0),
        np.array("1.0"),
        Decimal("nan"),
        Decimal("sNaN"),
        Decimal("1e400"),
    ],
    ids=repr,
)
def test_a_result_that_is_not_a_finite_number_is_invalid(result):
    failure = check_score(result)
    assert failure.kind == "invalid"
    if not isinstance(result, dict):
        assert type(result).__name__ in failure.text  # "1.0" and 1.0 look alike otherwise


@pytest.mark.parametrize(
    "result",
    [
        1,
        True,
        1.0,
        np.float32(1),
        np.int64(1),
        np.bool_(True),
        np.array(1.0),
        np.ones((1, 1)),
        torch.tensor(1.0),
        torch.ones(1),
        Decimal("1.0"),
        Fraction(3, 3),
    ],
    ids=repr,
)
def test_every_kind_of_number_is_a_score(result):
    score = check_score({"score": result, "note": "n", 3: "three"})
    assert (type(score.value), score.value, score.extra) == (float, 1.0, {"note": "n", "3": "three"})
