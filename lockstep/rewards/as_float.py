"""Numbers of other types than Python's own, as reward functions return them."""

import math
from decimal import Decimal
from numbers import Real
from typing import Any


def as_float(value: Any) -> float | None:
    """What a Decimal, a fraction, or one number of NumPy's or PyTorch's is as a float, which may be none that is finite; None for what is
    no number."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    try:
        return float(value) if isinstance(value, Real | Decimal) else None
    except (OverflowError, ValueError):
        return None
