import json
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

from lockstep.utils.json_values import as_json, is_number


def test_whatever_a_reward_function_said_can_be_written_as_strict_json():
    nan, inf = float("nan"), float("inf")
    said = {
        "n": [1, True, None, 0.5, np.float32(0.25), np.bool_(False), torch.tensor([3]), np.longdouble(0.5)],
        "none": [nan, -inf, np.float64(nan), torch.tensor(inf)],
        "text": ["é", Decimal("0.5"), Fraction(1, 2), {1}, np.arange(2), torch.ones(0), print, np.clongdouble(1)],
        3: {(1, 2): [{"deep": nan}]},
    }
    written = json.loads(json.dumps(as_json(said), allow_nan=False))
    assert written["n"] == [1, True, None, 0.5, 0.25, False, 3, 0.5]
    assert written["none"] == ["nan", "-inf", "nan", "inf"]
    assert all(isinstance(text, str) for text in written["text"])
    assert written["3"] == {"(1, 2)": [{"deep": "nan"}]}


def test_a_number_is_finite_as_a_float():
    numbers, others = [0, 1.5, True, np.int8(1), np.float16(0.5), np.bool_(True)], [float("nan"), np.inf, 10**400, "1", None, 1j]
    assert [*map(is_number, numbers)] == [True] * len(numbers)
    assert [*map(is_number, others)] == [False] * len(others)
