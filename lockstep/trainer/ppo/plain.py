"""What functions of the user's said, which may be anything: as JSON has it, and whether it is a number."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np


def is_number(value: Any) -> bool:
    """Whether it is a number, True and False among them, that is finite as a float."""
    try:
        return isinstance(value, Real | np.bool_) and math.isfinite(value)
    except OverflowError:  # an int beyond floats
        return False


def plain(value: Any) -> Any:
    """The same in what JSON knows, for files: what it does not know, and a number that is none, becomes text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        inner = value.item()
        if type(inner) is type(value):  # NumPy's long doubles
            return plain(float(value)) if is_number(value) else str(value)
        return plain(inner)
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
