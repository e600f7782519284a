"""Values of any kind, as user functions return them: whether one is a number, and what JSON can hold of it."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np


def is_number(value: Any) -> bool:
    """Return whether a value is a number (or True, False) that is finite as a float."""
    try:
        return isinstance(value, Real | np.bool_) and math.isfinite(value)
    except OverflowError:  # an int beyond floats
        return False


def as_json(value: Any) -> Any:
    """Return the value made of JSON's types. Values of other types, NaN and infinity become text."""
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        inner = value.item()
        if type(inner) is type(value):  # NumPy's long doubles
            return as_json(float(value)) if is_number(value) else str(value)
        return as_json(inner)
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
